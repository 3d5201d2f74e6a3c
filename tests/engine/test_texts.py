"""Texts of different lengths, padded to the longest of their batch: against brute force, one example at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.utils.data import DataLoader

from tests.cases import DEVICE, grouped, relative_error
from tests.engine.loops import SIGMA, C
from torchfil import FILPrivacyEngine, Private
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.engine import executor as evaluation
from torchfil.engine.replica import Replica
from torchfil.fisher import ExampleGradients
from torchfil.fisher.recording import Plan
from torchfil.run import file as run_file

WIDTH = 2
LENGTHS = [1, 4, 2, 3, 2, 1, 3, 4, 2, 2]


class Reader(nn.Module):
    """Reads a text by the mean of its tokens; ``careless``: padding's own outputs enter the mean."""

    def __init__(self, *, careless: bool = False, padding_idx: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH, padding_idx=padding_idx)
        self.places = nn.Embedding(6, WIDTH)
        self.hidden, self.head = nn.Linear(WIDTH, 3), nn.Linear(3, 2)
        self.careless = careless

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = (input_ids != 0) if attention_mask is None else attention_mask
        if self.careless:
            mask = torch.ones_like(mask)
        at = self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        weight = mask.to(self.head.weight.dtype)[..., None]
        read: Tensor = (torch.tanh(self.hidden(self.words(input_ids) + at)) * weight).sum(dim=1) / weight.sum(dim=1)
        return self.head(read)


def texts() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randint(1, 9, (length,), generator=generator), int(torch.randint(2, (), generator=generator)))
        for length in LENGTHS
    ]


def padded(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([tokens for tokens, _ in items], batch_first=True)
    return tokens, torch.tensor([label for _, label in items])


def padded_with_mask(items: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    tokens, labels = padded(items)
    lengths = torch.tensor([len(tokens) for tokens, _ in items])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).double()
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def split(batch: Any) -> tuple[Any, Tensor]:
    if isinstance(batch, dict):
        return {name: value.to(DEVICE) for name, value in batch.items() if name != "labels"}, batch["labels"].to(DEVICE)
    return batch[0].to(DEVICE), batch[1].to(DEVICE)


def trace_of(module: nn.Module, inputs: Any, target: Tensor, own: Tensor) -> float:
    """tr I of one example in one step, its own positions alone being private: [1, T] inputs, own [T]."""
    clip = get_clip(DEFAULT_CLIP)
    parameters = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
    arguments: Any = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})

    def clipped(z: Tensor) -> Tensor:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            def add(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
                return output.index_add(1, own.nonzero()[:, 0], z[None])

            handle = module.get_submodule("words").register_forward_hook(add)
            try:
                return F.cross_entropy(functional_call(module, parameters, *arguments), target)
            finally:
                handle.remove()

        g = torch.cat([part.flatten() for part in grad(loss)(parameters).values()])
        return g / clip.c(g.norm() / clip.threshold(C))

    z = torch.zeros(int(own.sum()), WIDTH, dtype=torch.float64, device=DEVICE)
    return float(jacrev(clipped)(z).square().sum()) / (SIGMA * C) ** 2


def train(
    module: nn.Module,
    *,
    collate: Callable[[Any], Any] = padded,
    way: str = "auto",
    steps: int = 4,
    private: Private | None = None,
    **options: Any,
) -> tuple[FILPrivacyEngine, Tensor]:
    """A run over the texts, and every example's true trace."""
    module, items = module.to(DEVICE, torch.float64), texts()
    engine = FILPrivacyEngine()
    given = {"noise_multiplier": SIGMA, "max_grad_norm": C, "estimator": "exact", "amplification": "none", "seed": 3}
    if collate is padded_with_mask:
        given["batch_to_inputs"] = split
    plain = copy.deepcopy(module)
    torch.manual_seed(1)
    model, optimizer, loader = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.3),
        DataLoader(items, batch_size=3, collate_fn=collate, generator=torch.Generator().manual_seed(2)),  # type: ignore[arg-type]
        criterion=nn.CrossEntropyLoss(),
        private=private,
        **grouped(**{**given, **options}),
    )
    truth, taken = torch.zeros(len(items), dtype=torch.float64), 0
    while taken < steps:
        for batch in loader:
            plain.load_state_dict(module.state_dict())
            inputs, targets = split(batch)
            for row, number in enumerate(batch._ids):
                alone = (
                    {k: v[row : row + 1] for k, v in inputs.items()}
                    if isinstance(inputs, dict)
                    else inputs[row : row + 1]
                )
                tokens = alone["input_ids"] if isinstance(alone, dict) else alone
                own = torch.arange(tokens.shape[1], device=DEVICE) < len(items[number][0])
                truth[number] += trace_of(plain, alone, targets[row : row + 1], own)
            if way == "train_step":
                engine.train_step(inputs, targets)
            else:
                optimizer.zero_grad()
                outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
                F.cross_entropy(outputs, targets).backward()
                optimizer.step()
            taken += 1
            if taken == steps:
                break
    return engine, truth


def check(engine: FILPrivacyEngine, truth: Tensor) -> None:
    """Traces are the true ones, d is 2 numbers a token, and what rests on both follows."""
    assert relative_error(engine.totals.get_trace().value.cpu(), truth) < 1e-6
    seen = truth > 0
    own = WIDTH * torch.tensor(LENGTHS)
    assert torch.equal(engine.totals.get_num_coordinates().cpu()[seen], own[seen])
    assert engine.totals.num_coordinates == int(own[seen].max())
    assert torch.allclose(engine.get_mse_bound().value.cpu()[seen], (own / truth)[seen], rtol=1e-6)
    assert torch.allclose(engine.get_fil().value.cpu()[seen], (truth / own).sqrt()[seen], rtol=1e-6)


@pytest.mark.parametrize("way", ["auto", "train_step"])
@pytest.mark.parametrize("careless", [False, True])
def test_tokens_that_are_padding_are_not_private(way: str, careless: bool) -> None:
    torch.manual_seed(0)
    check(*train(Reader(careless=careless, padding_idx=0), way=way))


@pytest.mark.parametrize("careless", [False, True])
def test_the_attention_mask_says_where_texts_end_and_is_not_private_though_it_is_floating(careless: bool) -> None:
    torch.manual_seed(0)
    check(*train(Reader(careless=careless), collate=padded_with_mask, poisson_sampling=False))


@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("kind", ["tied", "frozen"])
def test_tables_that_are_tied_or_frozen(kind: str, padding_idx: int | None) -> None:
    torch.manual_seed(0)
    module = Reader(careless=True, padding_idx=padding_idx)
    if kind == "tied":
        module.hidden, module.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 9, bias=False)
        module.head.weight = module.words.weight
    else:
        module.words.requires_grad_(False)
    lengths = None if padding_idx == 0 else "attention_mask"
    private = Private(submodule="words", lengths=lengths)
    check(*train(module, collate=padded_with_mask, private=private, steps=2))


def test_lengths_may_be_told_by_a_function() -> None:
    torch.manual_seed(0)
    private = Private(submodule="words", lengths=lambda tokens: (tokens != 0).sum(dim=1))
    module = Reader(careless=True)
    module.places.requires_grad_(False)  # of which hooks see one row for the whole batch
    check(*train(module, private=private, grad_sample_mode="hooks"))


def test_positions_that_nobody_tells_apart_all_count_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    with caplog.at_level("INFO"):
        engine, _ = train(Reader())
    told = [record.getMessage() for record in caplog.records]
    assert any("the output of the embedding 'words' is private" in line for line in told)
    assert any(line.startswith("private in every example: the output of 'words', ") for line in told)
    assert sum("nothing shows which positions are padding" in line for line in told) == 1
    measured = engine.was_measured().cpu()
    counted, own = engine.totals.get_num_coordinates().cpu()[measured], WIDTH * torch.tensor(LENGTHS)[measured]
    assert bool((counted >= own).all())
    assert bool((counted > own).any())


def test_sums_by_coordinate_need_the_longest_length() -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"diagonal is summed by coordinate.*private=Private\(max_length=…\)"):
        train(Reader(padding_idx=0), track=("diagonal",))
    private = Private(max_length=5)
    engine, truth = train(Reader(padding_idx=0), track=("diagonal", "plis"), private=private)
    assert relative_error(engine.totals.get_trace().value.cpu(), truth) < 1e-6
    diagonal = engine.totals.get("diagonal").value.cpu().reshape(len(LENGTHS), 5, WIDTH)
    assert torch.allclose(diagonal.sum(dim=(1, 2)), truth, rtol=1e-6)
    for row, length in enumerate(LENGTHS):
        assert not diagonal[row, length:].any()
        assert not engine.get_plis([row]).reshape(5, WIDTH)[length:].any()
        assert bool((diagonal[row, :length] > 0).all()) == bool(truth[row] > 0)
    with pytest.raises(ValueError, match=r"has 4 positions in this batch, more than max_length=3"):
        train(Reader(padding_idx=0), private=Private(max_length=3))


def test_tables_and_run_files_hold_every_examples_own_number(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine, truth = train(Reader(padding_idx=0))
    columns = engine.leakage_columns()[1]
    own = [WIDTH * length if seen else 0 for length, seen in zip(LENGTHS, (truth > 0).tolist(), strict=True)]
    assert columns["num_coordinates"] == own
    run = run_file.load(engine.save_run(tmp_path / "run.parquet", delta=1e-3))
    assert run.columns["num_coordinates"].tolist() == own
    assert run.about["dataset"]["most_coordinates"] == max(own)
    assert "num_coordinates" not in run.about["dataset"]
    with pytest.raises(ValueError, match="different numbers of private coordinates"):
        engine.get_population_mse_bound((-1.0, 1.0))


def test_runs_that_saw_different_texts_are_merged_and_resumed() -> None:
    torch.manual_seed(0)
    one, _ = train(Reader(padding_idx=0), steps=2)
    torch.manual_seed(0)
    other, _ = train(Reader(padding_idx=0), steps=2, seed=8)
    merged = FILPrivacyEngine.merge([one, other])
    largest = torch.maximum(one.totals.get_num_coordinates(), other.totals.get_num_coordinates())
    assert torch.equal(merged.get_num_coordinates(), largest)
    before = one.leakage_columns()[1]
    one.load_state_dict(one.state_dict())
    assert one.leakage_columns()[1] == before


def test_the_plis_of_texts_is_nan_at_padding() -> None:
    torch.manual_seed(0)
    engine, _ = train(Reader(padding_idx=0), steps=1)
    plis = engine.plis([0, 1, 2])
    assert plis.shape == (3, 4, WIDTH)
    assert [int((~row.isnan()).all(dim=1).sum()) for row in plis] == LENGTHS[:3]


def test_integers_beside_floats_count_as_known_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.town, self.head = nn.Embedding(5, 2), nn.Linear(5, 2)

        def forward(self, x: Tensor, town: Tensor) -> Tensor:
            out: Tensor = self.head(torch.cat([x, self.town(town)], dim=1).tanh())
            return out

    replica = Replica(Both())
    given = (torch.randn(2, 3), torch.tensor([1, 4]))
    for _ in range(2):
        assert replica.lay_out(given, {}, None, None).z.shape == (2, 3)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "only the floating-point inputs are private: the integers that 'town' takes count as known to the attacker. "
        "To protect them as well: private=Private(inputs=[0], submodule=['town'])"
    ]
    assert replica.lay_out(given, {}, None, Private(inputs=[0], submodule=["town"])).z.shape == (2, 5)


def test_words_of_the_most_exposed_texts(tmp_path: Path) -> None:
    """η² of a word is the mean of its coordinates' I_jj, and those of a text add up to its trace."""
    options = {"collate": padded_with_mask, "track": ("diagonal",)}
    engine, traces = train(Reader(), private=Private(submodule="words", max_length=5), **options)
    words = [[f"{t}" for t in tokens.tolist()] for tokens, _ in texts()]
    path = engine.save_run(tmp_path / "run.parquet", delta=1e-5, texts=words, hash_data=False)
    run = run_file.load(path)
    assert run.attributes is None
    assert run.texts is not None
    assert run.texts.rows.tolist() == engine.get_fil().value.argsort(descending=True).tolist()[: len(run.texts.rows)]
    assert run.texts.fil.shape[1] == 5
    for row, own, fil in zip(run.texts.rows, run.texts.words, run.texts.fil, strict=True):
        assert own == words[row]
        assert bool((fil[: len(own)] >= 0).all())
        assert bool(torch.from_numpy(fil[len(own) :]).isnan().all())
        assert WIDTH * float((fil[: len(own)] ** 2).sum()) == pytest.approx(float(traces[row]), rel=1e-5)
    for wrong, why in ((words[:-1], "9 entries for 10"), ([[*each, *"abcde"] for each in words], "do not fit")):
        with pytest.raises(ValueError, match=why):
            engine.save_run(tmp_path / "wrong.parquet", delta=1e-5, texts=wrong)
    untracked, _ = train(Reader(), collate=padded_with_mask, private=Private(submodule="words"))
    with pytest.raises(ValueError, match="track=\\('diagonal',\\)"):
        untracked.save_run(tmp_path / "wrong.parquet", delta=1e-5, texts=words)


def test_a_length_between_others_needs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """After four lengths, those between them are taken on trust; shorter and longer ones are tried."""
    tried: list[int] = []
    monkeypatch.setattr(evaluation, "plan", lambda gradients: tried.append(gradients.num_coordinates) or Plan(None, 64))

    evaluator = evaluation.Executor(Replica(nn.Linear(3, 2)), 4, 2**20, cuda_graphs=False)

    def plan_for(length: int) -> Plan:
        model = nn.Sequential(nn.Flatten(), nn.Linear(length, 2))
        x, y = torch.randn(4, length), torch.zeros(4, dtype=torch.int64)
        return evaluator.plan(ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y))

    for length in (4, 9, 6, 12, 7, 10, 5, 7, 3, 13, 8):
        assert plan_for(length).fits
    assert tried == [4, 9, 6, 12, 3, 13]
