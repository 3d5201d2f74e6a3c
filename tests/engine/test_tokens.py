"""FIL and PLIS by token against jacrev in float64, with the tokens as strings or decoded from the data set."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.nn import functional as F

from tests.cases import DEVICE
from tests.engine.loops import SIGMA, C
from tests.engine.test_texts import LENGTHS, WIDTH, Reader, padded_with_mask, texts, train
from torchfil import PLIS, Private
from torchfil.attribution.plis import token_norms
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.engine.saving.data import token_ids
from torchfil.report import load, write_report

LONGEST = 5
WORDS = ["<pad>", "the", " a", "##b", "c", "d", "<e>", "f", "g"]


def clipped_gradient(module: nn.Module, tokens: Tensor, label: int, z: Tensor) -> Tensor:
    """g̃ of one text whose embeddings are moved by z, [T, width]; plain autograd."""
    clip = get_clip(DEFAULT_CLIP)
    parameters = {name: value.detach() for name, value in module.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        handle = module.get_submodule("words").register_forward_hook(lambda _m, _i, output: output + z[None])
        try:
            outputs = functional_call(module, parameters, (tokens[None],))
        finally:
            handle.remove()
        return F.cross_entropy(outputs, torch.tensor([label], device=tokens.device))

    g = torch.cat([part.flatten() for part in grad(loss)(parameters).values()])
    return g / clip.c(g.norm() / clip.threshold(C))


def true_maps(module: nn.Module, row: int) -> tuple[Tensor, Tensor]:
    """η_t of one step and ‖∂PL/∂z_t‖ of every token of a text, [T] each."""
    tokens, label = texts()[row]
    tokens = tokens.to(DEVICE)
    z = torch.zeros(len(tokens), WIDTH, dtype=torch.float64, device=DEVICE)
    jacobian = jacrev(lambda moved: clipped_gradient(module, tokens, label, moved))(z)  # [p, T, width]
    information = jacobian.square().sum(dim=0) / (SIGMA * C) ** 2
    slope = jacrev(lambda moved: clipped_gradient(module, tokens, label, moved).square().sum() / (SIGMA * C) ** 2)(z)
    return information.mean(dim=1).sqrt().cpu(), slope.norm(dim=1).cpu()


def one_step(**options: Any) -> tuple[Any, nn.Module, nn.Module]:
    """An engine after one step, the model before it and after it."""
    torch.manual_seed(0)
    module = Reader(padding_idx=0).double()
    before = copy.deepcopy(module).to(DEVICE)
    private = Private(submodule="words", max_length=LONGEST)
    given = {"track": ("diagonal",), "private": private, "steps": 1, "poisson_sampling": False, **options}
    engine, _ = train(module, **given)
    return engine, before, module


def check_maps(engine: Any, before: nn.Module, after: nn.Module, run: Any) -> None:
    assert run.texts is not None
    assert len(run.texts.rows) == 3  # of the one batch
    for place, row in enumerate(run.texts.rows):
        length = LENGTHS[row]
        fil, plis = true_maps(before, row)[0], true_maps(after, row)[1]
        assert len(run.texts.words[place]) == length
        assert np.allclose(run.texts.fil[place][:length], fil, rtol=1e-6)
        assert np.allclose(run.texts.plis[place][:length], plis, rtol=1e-6)
        assert np.isnan(run.texts.fil[place][length:]).all()
        assert np.isnan(run.texts.plis[place][length:]).all()


class Tokenizer:
    """What has ``decode``, as Hugging Face's tokenizers do."""

    def decode(self, tokens: list[int]) -> str:
        (token,) = tokens
        return WORDS[token]


@pytest.mark.parametrize("how", ["strings", "tokenizer", "function"])
def test_both_maps_are_those_of_jacrev(how: str, tmp_path: Path) -> None:
    engine, before, after = one_step()
    strings = [[WORDS[token] for token in tokens.tolist()] for tokens, _ in texts()]
    given: Any = {"strings": strings, "tokenizer": Tokenizer(), "function": Tokenizer().decode}[how]
    run = load(engine.save_run(tmp_path / "run.parquet", delta=1e-5, texts=given))
    check_maps(engine, before, after, run)
    assert run.texts is not None
    assert run.texts.words == [strings[row] for row in run.texts.rows]
    shown = write_report(run, tmp_path / "page").read_text()
    assert re.search(r"<section id=\"words\">.*‖PLIS‖", shown, flags=re.DOTALL)


def test_tokens_with_an_attention_mask(tmp_path: Path) -> None:
    """Padding is neither decoded nor shown, and ids are told from the mask by their name."""
    engine, before, after = one_step(collate=padded_with_mask)
    run = load(engine.save_run(tmp_path / "run.parquet", delta=1e-5, texts=Tokenizer()))
    check_maps(engine, before, after, run)
    assert run.texts is not None
    assert all("<pad>" not in words for words in run.texts.words)


def test_plis_of_a_plain_model_by_token() -> None:
    torch.manual_seed(0)
    module = Reader(padding_idx=0).double().to(DEVICE)
    items = [texts()[row] for row in (1, 3)]
    tokens = nn.utils.rnn.pad_sequence([each for each, _ in items], batch_first=True).to(DEVICE)
    labels = torch.tensor([label for _, label in items], device=DEVICE)
    plis = PLIS(module, nn.CrossEntropyLoss(), SIGMA * C, C, private=Private(submodule="words"))
    norms = token_norms(plis.attribute(tokens, labels)).cpu()
    for place, row in enumerate((1, 3)):
        assert torch.allclose(norms[place, : LENGTHS[row]], true_maps(module, row)[1], rtol=1e-9)
        assert bool(norms[place, LENGTHS[row] :].isnan().all())


def test_tokens_that_nobody_can_find_are_refused() -> None:
    engine, _, _ = one_step()
    passes = engine._training.passes
    passes.dataset = None
    with pytest.raises(ValueError, match="a stream cannot be read again: give texts= as strings"):
        token_ids(passes, [0, 1])
    passes.dataset, passes.collate_fn = [(torch.rand(4), 0) for _ in range(10)], torch.utils.data.default_collate
    with pytest.raises(ValueError, match="0 inputs of the model hold integers by position"):
        token_ids(passes, [0, 1])
