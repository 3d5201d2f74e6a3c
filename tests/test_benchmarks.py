"""The benchmark's parts: what is timed is what it says, failures are told, and the page holds everything."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from benchmarks import __main__ as command
from benchmarks import comparison, large, loops, matched, measuring, paper, targets
from benchmarks import many_examples as many
from benchmarks.tables import number, page
from torchfil.fisher.operator import ClippedJacobian
from torchfil.report import load


def tiny() -> loops.Model:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 10))

    return loops.Model("tiny", build, loops.random_images(1, 3), 8, 8)


def test_the_papers_columns_are_those_of_the_clipped_jacobian() -> None:
    gradients = paper.examples_of(tiny(), 6, "cpu", train_steps=3)
    directions = paper.random_directions(gradients.examples.z, 9, torch.Generator().manual_seed(0))
    assert torch.equal(torch.stack(directions).sum(dim=0), torch.ones(6, 9))  # every coordinate once
    jacobian = ClippedJacobian(gradients, paper.CLIP, 0.1)
    for direction in directions:
        want = jacobian.matvec(direction).square().sum(dim=1)
        torch.testing.assert_close(paper.clipped_column_norms(gradients, direction, 0.1), want, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("count", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_coordinates_and_probes_estimate_the_same(count: int) -> None:
    gradients = paper.examples_of(tiny(), 8, "cpu")
    generator = torch.Generator().manual_seed(1)
    columns = paper.column_estimates(gradients, 9, generator)
    drawn = paper.traces(gradients, count, 400 // count, generator)
    torch.testing.assert_close(drawn.mean(dim=0), columns.mean(dim=0), rtol=0.15, atol=0)


@pytest.mark.parametrize(("draws", "tolerance"), [(100, 0.24), pytest.param(400, 0.12, marks=pytest.mark.slow)])
def test_the_error_of_probes_falls_with_their_root(draws: int, tolerance: float) -> None:
    gradients = paper.examples_of(tiny(), 8, "cpu", train_steps=20)
    generator = torch.Generator().manual_seed(1)
    few, many = (paper.relative_std(paper.traces(gradients, count, draws, generator)) for count in (3, 12))
    assert many == pytest.approx(few / 2, rel=tolerance)


def test_matching_probes_have_the_error_of_fifty_coordinates() -> None:
    """Both by drawing again and again: columns without replacement, and squares of Gaussians for the probes."""
    generator, d, repeats = torch.Generator().manual_seed(0), 200, 20_000
    columns = torch.rand(d, generator=generator, dtype=torch.float64).square()
    r_column, r_three = float(columns.std(correction=0) / columns.mean()), 0.3
    error, probes = paper.error_of_coordinates(r_column, 50, d), matched.matching_probes(r_column, r_three, d)
    chosen = torch.rand(repeats, d, generator=generator).argsort(dim=1)[:, : paper.PAPER_COORDINATES]
    means = columns[chosen].mean(dim=1)
    assert float(means.std() / means.mean()) == pytest.approx(error, rel=0.03)
    spread = r_three * 3**0.5  # of one probe
    drawn = 1 + spread * torch.randn(repeats, probes, generator=generator, dtype=torch.float64)
    assert float(drawn.mean(dim=1).std()) < 1.02 * error < float(drawn[:, 1:].mean(dim=1).std()) * 1.05
    assert matched.matching_coordinates(r_column, error, d) == pytest.approx(50)
    assert matched.matching_coordinates(r_column, 9.0, d) == 1
    with pytest.raises(ValueError, match="are exact"):
        matched.matching_probes(0.5, 0.1, 50)


@pytest.mark.slow
def test_the_matched_steps_are_put_together_from_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))

    monkeypatch.setattr(matched, "MODELS", {"tiny": loops.Model("tiny", build, loops.random_images(1, 8), 8, 8)})
    monkeypatch.setattr(matched, "coordinate_cost", lambda *_, **__: {"coordinate_seconds": 0.5})
    found = matched.matched("tiny", "cpu", quick=True)
    assert list(found["states"]) == ["initial weights", "after 300 plain steps"]
    for state in found["states"].values():
        assert [row["probes"] for row in state["rows"][:2]] == [1, 3]
        assert state["rows"][2]["probes"] >= 2
        assert state["rows"][2]["coordinates"] == paper.PAPER_COORDINATES
        for row in state["rows"]:
            assert row["paper_seconds"] == pytest.approx(found["opacus_seconds"] + 0.5 * row["coordinates"])
            assert row["plain_slower"] == pytest.approx(row["paper_seconds"] / row["plain_seconds"])
            if row["coordinates"] == paper.PAPER_COORDINATES:
                assert row["error"] <= row["paper_error"]
            elif row["coordinates"] > 1:
                assert row["error"] == pytest.approx(row["paper_error"])
    assert "matched" in command.SECTIONS
    text = page({"machine": command.machine("cpu"), "quick": True, "matched": {"tiny": found}})
    assert text.count("| tiny, batch 8, d = 64 |") == 6
    assert "500 ms for a coordinate" in text


def test_trained_weights_are_looked_at_where_training_is_cheap() -> None:
    light, heavy = tiny(), replace(tiny(), heavy=True)
    assert [len(light.states(device)) for device in ("cpu", "cuda")] == [2, 2]
    assert [len(heavy.states(device)) for device in ("cpu", "cuda")] == [1, 2]


def test_data_at_hand_are_repeated_and_others_replaced() -> None:
    def missing() -> tuple[torch.Tensor, torch.Tensor]:
        raise FileNotFoundError

    three = torch.arange(3.0).reshape(3, 1, 1, 1), torch.arange(3)
    images, labels = loops.at_hand(lambda: three, loops.random_images(1, 1))(5)
    assert images.flatten().tolist() == labels.tolist() == [0, 1, 2, 0, 1]
    assert loops.at_hand(missing, loops.random_images(2, 4))(5)[0].shape == (5, 2, 4, 4)


def test_the_labels_of_sentences_can_be_learned() -> None:
    tokens, labels = loops.sentences(500)
    assert 0.3 < labels.double().mean() < 0.6
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        ends = [token % 10 for token in row]
        assert label == (ends.count(3) > ends.count(7))


def test_a_call_that_fails_leaves_its_reason_and_the_others_go_on() -> None:
    calls = []

    def breaks() -> None:
        calls.append("breaks")
        if len(calls) > 2:
            raise RuntimeError("out of\nmemory")

    found = measuring.seconds_in_turns({"a": lambda: None, "b": breaks}, "cpu", repeats=3, warm_up=2)
    assert found["b"] == {"failed": "RuntimeError: out of memory"}
    assert 0 <= found["a"]["seconds"] < 0.1
    assert len(calls) == 3


def test_slopes() -> None:
    assert measuring.power([1, 2, 4], [5, 10, 20]) == pytest.approx(1)
    assert measuring.line([2, 4, 8], [7, 11, 19]) == pytest.approx((3, 2))


def test_all_methods_see_the_same_batches() -> None:
    ids = []
    for variant in loops.variants("cpu").values():
        loop = loops.Loop(tiny(), variant, "cpu", batches=3)
        ids.append([next(loop.batches)[0].sum().item() for _ in range(3)])
    assert all(one == ids[0] for one in ids)


def test_numbers_are_short() -> None:
    assert [number(v) for v in (None, 0.01234, 12.34, 1234.5, 1e9)] == ["–", "0.0123", "12.3", "1,234", "1e+09"]


@pytest.mark.slow
def test_the_command_writes_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a tiny model; a part that fails is told on the page, and a second run keeps what it is not asked for."""
    for module in (comparison, command):
        monkeypatch.setattr(module, "MODELS", {"tiny": tiny()})
    arguments = ["benchmarks", "--device", "cpu", "--quick", "--out", str(tmp_path), "--sections"]
    monkeypatch.setattr(sys, "argv", [*arguments, "models"])
    command.main()
    found = json.loads((tmp_path / "cpu.json").read_text())
    rows = found["models"]["tiny"]["rows"]
    assert rows[loops.UNIT]["ratio"] == 1
    assert not [row for row in rows.values() if "failed" in row]
    paper_rows = found["models"]["tiny"]["paper"]
    unit = rows[loops.UNIT]["seconds"]
    assert paper_rows["fifty_seconds"] == pytest.approx(unit + 50 * paper_rows["coordinate_seconds"])

    def broken(*_: object, **__: object) -> dict[str, object]:
        raise RuntimeError("no such device")

    monkeypatch.setattr(command, "growth", broken)
    monkeypatch.setattr(sys, "argv", [*arguments, "growth"])
    command.main()
    text = (tmp_path / "cpu.md").read_text()
    assert "growth: RuntimeError: no such device" in text
    assert "torchfil train_step, 1 probe" in text
    assert text in capsys.readouterr().out


class Output(NamedTuple):
    """What such a model gives."""

    loss: torch.Tensor | None
    logits: torch.Tensor


class Classifier(nn.Module):
    """Gives its loss itself, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 4), nn.Linear(4, 2)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
    ) -> Output:
        logits = self.head((self.words(input_ids) * attention_mask[..., None]).mean(dim=1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Output(loss=loss, logits=logits)


@pytest.mark.slow
def test_a_large_model_runs_by_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    model = large.LargeModel(
        "tiny", (), lambda small: Classifier(), partial(large._texts, 50, 8, causal=False), 4, "words"
    )
    monkeypatch.setattr(large, "LARGE", {"tiny": model})
    found = large.compare_large("tiny", "cpu", quick=True)
    assert list(found["precisions"]) == ["float32", "bf16 autocast"]
    for rows in found["precisions"].values():
        assert list(rows) == list(large.METHODS)
        assert not {title: row["failed"] for title, row in rows.items() if "failed" in row}
        assert rows[large.UNIT]["ratio"] == 1
    text = page({"machine": command.machine("cpu"), "quick": True, "large": {"tiny": found}})
    assert "tiny (tiny), batch 4, bf16 autocast" in text


def test_large_models_are_asked_for_by_name_and_tell_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = large.LargeModel("a model", ("no_such_package",), lambda small: Classifier(), large._images, 4)
    for module in (large, command):
        monkeypatch.setattr(module, "LARGE", {"bert": nowhere})
    monkeypatch.setattr(
        sys, "argv", ["benchmarks", "--device", "cpu", "--quick", "--out", str(tmp_path), "--models", "bert"]
    )
    command.main()
    assert "pip install no_such_package" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "cpu.json").read_text())) == ["machine", "quick", "large"]
    assert {"bert", "gpt2", "vit_base", "convnext_tiny", "llama_lora"}.isdisjoint(loops.MODELS)


def test_texts_are_padded_and_their_labels_ignored_there() -> None:
    texts = large._texts(50, 128, 40, small=True, causal=True)
    own = texts["attention_mask"].bool()
    assert 0 < int((~own).sum()) < own.numel() / 4
    assert bool((texts["labels"][~own] == -100).all())
    assert torch.equal(texts["labels"][own], texts["input_ids"][own])


def test_targets_are_checked_over_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    run = targets.kept("digits", 0, "cpu", examples=60, epochs=2, rate=0.5, target_mse_bound=0.1, of="probes")
    assert run["met"] == (run["headroom"] >= 1)
    assert run["noise_multiplier"] in [sigma for sigma, *_ in run["pilots"]]
    assert "seed 0: σ = " in capsys.readouterr().out


def test_a_run_of_many_examples_states_its_bytes(tmp_path: Path) -> None:
    found = many.train_and_save(300, tmp_path / "run.parquet", all_drawn=True)
    assert found["bytes_an_example"] == found["bytes_an_example_drawn"] == 136
    assert len(load(tmp_path / "run.parquet")) == 300


def test_the_page_tells_of_many_examples() -> None:
    examples = {
        "sizes": [100, 1000],
        "all_drawn": False,
        "seconds": {"inspect": [1.0, 10.0]},
        "peak_gb": {"inspect": [0.1, 0.2]},
        "details": [{"bytes_an_example": 136.0, "bytes_an_example_drawn": 136, "file_gb": 0.1}] * 2,
        "power": {"inspect": 1.0},
    }
    text = page({"machine": command.machine("cpu"), "quick": False, "examples": examples})
    assert "| inspect | 1 s, 0.1 GB | 10 s, 0.2 GB | 1 |" in text
    assert "an example that was drawn takes 136 bytes" in text


@pytest.mark.slow
def test_every_stage_of_many_examples_runs() -> None:
    found = many.many_examples([300])
    assert list(found["seconds"]) == list(found["peak_gb"]) == list(many.STAGES)
    assert all(0 < gb[0] < 4 for gb in found["peak_gb"].values())
