"""Texts of different lengths, padded to the longest of their batch: their own tokens alone are
private.

FIL and PLIS by token, too, with the tokens as strings or decoded from the data set.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.cases import DEVICE, relative_error
from tests.engine.brute_force import Pass, Run, clipped_and_jacobian, make, random_state, train
from tests.engine.ways import LOSS
from torchfil import Private
from torchfil.report import load

SIGMA, C, WIDTH, LONGEST = 0.9, 0.5, 2, 5
LENGTHS = [1, 4, 2, 3, 2, 1, 3, 4]
OWN = WIDTH * torch.tensor(LENGTHS)
WORDS = ["<pad>", "the", " a", "##b", "c", "d", "<e>", "f", "g"]


class Reader(nn.Module):
    """Reads a text by the mean of its tokens; ``careless``: padding's own outputs enter the
    mean.
    """

    def __init__(self, *, careless: bool = False, padding_idx: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = (
            nn.Embedding(9, WIDTH, padding_idx=padding_idx),
            nn.Embedding(6, WIDTH),
        )
        self.hidden, self.head, self.careless = nn.Linear(WIDTH, 3), nn.Linear(3, 2), careless
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = (input_ids != 0) if attention_mask is None else attention_mask
        weight = (torch.ones_like(mask) if self.careless else mask).to(self.head.weight.dtype)[
            ..., None
        ]
        at = self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        read = (torch.tanh(self.hidden(self.words(input_ids) + at)) * weight).sum(
            dim=1
        ) / weight.sum(dim=1)
        return self.head(read)


def texts() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randint(1, 9, (length,), generator=generator), k % 2)
        for k, length in enumerate(LENGTHS)
    ]


def padded(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([tokens for tokens, _ in items], batch_first=True)
    return tokens, torch.tensor([label for _, label in items])


def padded_with_mask(items: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    tokens, labels = padded(items)
    lengths = torch.tensor([len(tokens) for tokens, _ in items])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).double()
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def trained(
    module: nn.Module | None = None,
    collate: Any = padded,
    steps: int = 2,
    way: str = "auto",
    **options: Any,
) -> Run:
    module = Reader(padding_idx=0) if module is None else module
    given = {
        "criterion": LOSS,
        "noise_multiplier": SIGMA,
        "loading": {"collate_fn": collate},
        **options,
    }
    if collate is padded_with_mask:
        given["batch_to_inputs"] = lambda batch: (
            {k: v for k, v in batch.items() if k != "labels"},
            batch["labels"],
        )
    return train(make(module, texts(), **{"batch_size": 3, **given}), steps=steps, way=way)


def traces(run: Run) -> Tensor:
    """tr I of every text, its own positions alone being private."""
    total = torch.zeros(len(LENGTHS), dtype=torch.float64)
    for begun in [begun for passes in run.passes for begun in passes if begun.ids]:
        _, jacobian = clipped_and_jacobian(run.plain, begun, "words")
        for row, columns in zip(begun.ids, jacobian, strict=True):
            total[row] += float(columns[:, : OWN[row]].square().sum()) / (SIGMA * C) ** 2
    return total


def check(run: Run) -> None:
    """Traces are the true ones, d is 2 numbers a token, and what rests on both follows."""
    engine, truth = run.engine, traces(run)
    seen = truth > 0
    assert relative_error(engine.totals.get_trace().value, truth) < 1e-6
    assert torch.equal(engine.totals.get_num_coordinates().cpu()[seen], OWN[seen])
    assert engine.totals.num_coordinates == int(OWN[seen].max())
    assert torch.allclose(engine.get_mse_bound().value.cpu()[seen], (OWN / truth)[seen], rtol=1e-6)
    assert torch.allclose(engine.get_fil().value.cpu()[seen], (truth / OWN).sqrt()[seen], rtol=1e-6)


def tied() -> nn.Module:
    module = Reader(careless=True)
    module.hidden, module.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 9, bias=False)
    module.head.weight = module.words.weight
    return module.double()


def frozen(table: str, padding_idx: int | None = None) -> nn.Module:
    module = Reader(careless=True, padding_idx=padding_idx)
    module.get_submodule(table).requires_grad_(False)
    return module


BY_MASK = Private(submodule="words", lengths="attention_mask")
BY_FUNCTION = Private(submodule="words", lengths=lambda tokens: (tokens != 0).sum(dim=1))


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Reader(padding_idx=0), {}),
        (Reader(padding_idx=0, careless=True), {"way": "train_step"}),
        # the mask floats, and is not private
        (Reader(), {"collate": padded_with_mask, "poisson_sampling": False}),
        (
            Reader(careless=True),
            {"collate": padded_with_mask, "poisson_sampling": False, "way": "train_step"},
        ),
        (tied(), {"collate": padded_with_mask, "private": BY_MASK}),
        (frozen("words"), {"collate": padded_with_mask, "private": BY_MASK}),
        (frozen("words", 0), {"collate": padded_with_mask, "private": Private(submodule="words")}),
        # hooks see one row of places
        (frozen("places"), {"private": BY_FUNCTION, "grad_sample_mode": "hooks"}),
    ],
)
def test_tokens_that_are_padding_are_not_private(
    module: nn.Module, options: dict[str, Any]
) -> None:
    check(trained(copy.deepcopy(module), **options))


def test_positions_that_nobody_tells_apart_all_count() -> None:
    engine = trained(Reader(), steps=4).engine
    measured = engine.was_measured().cpu()
    counted = engine.totals.get_num_coordinates().cpu()[measured]
    assert bool((counted >= OWN[measured]).all())
    assert bool((counted > OWN[measured]).any())


def test_sums_by_coordinate_need_the_longest_length() -> None:
    for options in ({"track": ("diagonal",)}, {"private": Private(max_length=3)}):
        with pytest.raises(ValueError, match="max_length"):
            trained(steps=4, **options)
    run = trained(track=("diagonal", "plis"), private=Private(max_length=LONGEST))
    truth = traces(run)
    diagonal = run.engine.totals.get("diagonal").value.cpu().reshape(len(LENGTHS), LONGEST, WIDTH)
    assert torch.allclose(diagonal.sum(dim=(1, 2)), truth, rtol=1e-6)
    for row, length in enumerate(LENGTHS):
        assert not diagonal[row, length:].any()
        assert not run.engine.get_plis([row]).reshape(LONGEST, WIDTH)[length:].any()
        assert bool((diagonal[row, :length] > 0).all()) == bool(truth[row] > 0)


def true_maps(module: nn.Module, row: int) -> tuple[Tensor, Tensor]:
    """η_t of one step and ‖∂PL/∂z_t‖ of every token of a text, [T] each."""
    tokens, label = texts()[row]
    alone = Pass(
        random_state(),
        module.state_dict(),
        tokens[None].to(DEVICE),
        torch.tensor([label]).to(DEVICE),
        [row],
    )
    g, jacobian = clipped_and_jacobian(Reader(padding_idx=0).to(DEVICE), alone, "words")
    information = jacobian[0].square().sum(dim=0) / (SIGMA * C) ** 2
    slope = 2 * jacobian[0].T @ g[0] / (SIGMA * C) ** 2
    return information.reshape(-1, WIDTH).mean(dim=1).sqrt().cpu(), slope.reshape(-1, WIDTH).norm(
        dim=1
    ).cpu()


class Tokenizer:
    """What has ``decode``, as Hugging Face's tokenizers do."""

    def decode(self, tokens: list[int]) -> str:
        return WORDS[tokens[0]]


STRINGS = [[WORDS[token] for token in tokens.tolist()] for tokens, _ in texts()]
BY_TOKEN = {
    "track": ("diagonal",),
    "private": Private(submodule="words", max_length=LONGEST),
    "steps": 1,
}


@pytest.mark.parametrize(
    ("given", "collate"),
    [(STRINGS, padded), (Tokenizer().decode, padded), (Tokenizer(), padded_with_mask)],
)
def test_maps_by_token_are_those_of_brute_force(given: Any, collate: Any, tmp_path: Path) -> None:
    """η² of a word is the mean of its coordinates' I_jj; padding is neither decoded nor shown."""
    run = trained(collate=collate, poisson_sampling=False, **BY_TOKEN)
    saved = load(run.engine.save_run(tmp_path / "run.parquet", delta=1e-5, texts=given))
    maps = saved.texts
    # of the one batch
    fil = run.engine.get_fil().value.nan_to_num(nan=-1.0)
    assert maps.rows.tolist() == fil.argsort(descending=True).tolist()[:3]
    for row, own, *shown in zip(maps.rows, maps.words, maps.fil, maps.plis, strict=True):
        assert own == STRINGS[row]
        for values, true in zip(
            shown, (true_maps(run.plain, row)[0], true_maps(run.module, row)[1]), strict=True
        ):
            assert np.allclose(values[: LENGTHS[row]], true, rtol=1e-6)
            assert np.isnan(values[LENGTHS[row] :]).all()


def test_words_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    engine, untracked = (
        trained(**BY_TOKEN).engine,
        trained(private=Private(submodule="words")).engine,
    )
    longer = [[*each, *"abcde"] for each in STRINGS]
    for run, given, why in (
        (engine, STRINGS[:-1], "7"),
        (engine, longer, "fit"),
        (untracked, STRINGS, "'diagonal'"),
    ):
        with pytest.raises(ValueError, match=why):
            run.save_run(tmp_path / "wrong.parquet", delta=1e-5, texts=given)
