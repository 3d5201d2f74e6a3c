"""Two gloo ranks in Lightning's and in Hugging Face's loop are one process with the same draws (float64)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch", reason="lightning is not installed (torchfil[lightning])")
pytest.importorskip("accelerate", reason="accelerate is not installed (torchfil[huggingface])")
pytest.importorskip("transformers", reason="transformers is not installed (torchfil[huggingface])")

from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_runs import as_one
from tests.integrations.loop_ranks import Fitted, lightning_fit, lightning_refusal, trainer_fit


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(2, tmp_path_factory.mktemp("ranks"), preloaded=["tests.integrations.loop_ranks"]) as pool:
        yield pool


def assert_same(ours: Fitted, theirs: Fitted, tolerance: float = 1e-6) -> None:
    assert ours.steps == theirs.steps
    for a, b in zip(ours.weights, theirs.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert ours.epsilon == pytest.approx(theirs.epsilon, rel=1e-12)
    assert max(theirs.columns["fil"]) > 0
    assert ours.columns.keys() == theirs.columns.keys()
    for name, column in theirs.columns.items():
        same = column if isinstance(column[0], str) else pytest.approx(column, rel=tolerance, abs=1e-9)
        assert ours.columns[name] == same, name


ACCUMULATED = {"trainer_options": {"accumulate_grad_batches": 2}, "batch_size": 2}
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [{}, slow(ACCUMULATED), slow({"poisson_sampling": False, "n": 40})], ids=str)
def test_two_ranks_in_lightning_are_one_process(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    parts = ranks.run(lightning_fit, str(tmp_path), **options)
    of_one = {**options, "batch_size": 8, "trainer_options": {}, "replayed": as_one([part.draws for part in parts])}
    alone = lightning_fit(str(tmp_path / "alone"), **of_one)
    for part in parts:
        assert_same(part, alone)
        assert part.notes["wrappers"] == 0
        assert part.notes["is_plain"]
        assert part.notes["logged"] == pytest.approx(alone.epsilon, rel=1e-6)
        assert part.notes["seen"] in (40, 42)  # Lightning still deals out what is validated; 42: it repeats one
    written = (tmp_path / "leakage.csv").read_text()
    assert written.count("\n") == 1 + options.get("n", 41)


@pytest.mark.slow
def test_a_fit_of_ranks_goes_on_from_its_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks.run(lightning_fit, str(tmp_path / "whole"))
    begun = ranks.run(lightning_fit, str(tmp_path), epochs=1)
    resumed = ranks.run(lightning_fit, str(tmp_path), resumed=True)
    for part, expected, first in zip(resumed, whole, begun, strict=True):
        assert first.draws == expected.draws[: len(first.draws)]
        assert len(first.draws) + len(part.draws) == len(expected.draws)
        assert (part.steps, part.epsilon) == (expected.steps, expected.epsilon)

    # the loader's own generator is not in Lightning's checkpoints: the second epoch draws as the first one did
    draws = [*as_one([part.draws for part in begun]), *as_one([part.draws for part in resumed])]
    alone = lightning_fit(str(tmp_path / "alone"), batch_size=8, replayed=draws)
    for part in resumed:
        assert_same(part, alone)


@pytest.mark.slow
def test_a_fit_of_ranks_goes_on_in_one_process(ranks: RankPool, tmp_path: Path) -> None:
    begun = ranks.run(lightning_fit, str(tmp_path), epochs=1)
    resumed = lightning_fit(str(tmp_path), batch_size=8, resumed=True)
    draws = [*as_one([part.draws for part in begun]), *resumed.draws]
    assert_same(resumed, lightning_fit(str(tmp_path / "alone"), batch_size=8, replayed=draws))


def test_what_one_rank_refuses_ends_the_fit_on_all(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(lightning_refusal, str(tmp_path), bad=3)
    assert sum("StepNotTakenError: another rank refused" in each for each in told) == 1
    assert sum("nan" in each.lower() or "finite" in each for each in told) == 1


def test_a_sampler_that_may_draw_the_same_on_two_ranks_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(lightning_refusal, str(tmp_path), poisson_sampling=False)  # 41 examples
    assert all("must draw from its own part of the data" in each for each in told)
    told = ranks.run(lightning_refusal, str(tmp_path), poisson_sampling=False, weighted=True)
    assert all("two ranks can draw the same" in each for each in told)


@pytest.mark.parametrize("options", [{}, slow({"poisson_sampling": False, "n": 24})], ids=str)
def test_two_ranks_in_the_trainer_are_one_process(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    parts = ranks.run(trainer_fit, str(tmp_path), **options)
    draws = as_one([part.draws for part in parts])
    alone = trainer_fit(str(tmp_path / "alone"), **options, batch_size=6, replayed=draws)
    for part in parts:
        assert_same(part, alone)
        assert part.notes["wrappers"] == 0
        assert part.notes["logged"] == pytest.approx(alone.notes["logged"], rel=1e-6)
    written = (tmp_path / "leakage.csv").read_text()
    assert written.count("\n") == 1 + options.get("n", 25)


@pytest.mark.slow
def test_a_trainer_of_ranks_goes_on_from_its_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    """In the middle of an epoch, with draws of its own; in one process with the same draws."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = ranks.run(trainer_fit, str(tmp_path), arguments=saving)
    saved = str(tmp_path / "checkpoint-3")
    resumed = ranks.run(trainer_fit, str(tmp_path / "again"), resumed=saved)
    for part, expected in zip(resumed, whole, strict=True):
        assert (part.steps, part.epsilon) == (expected.steps, expected.epsilon)
    draws = as_one([part.draws for part in resumed])
    alone = trainer_fit(str(tmp_path / "alone"), batch_size=6, replayed=draws, resumed=saved)
    for part in resumed:
        assert_same(part, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning", "huggingface"])
def test_the_guides_code_runs_on_two_processes(name: str, tmp_path: Path) -> None:
    """As a user starts it: Lightning by itself, with devices=2 and strategy="ddp"; the Trainer under torchrun."""
    guide = Path(__file__).parents[2] / "docs" / "guide" / "integrations.md"
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
    (code,) = [block for block in blocks if f"torchfil.integrations.{name}" in block]
    code = code.replace('accelerator="cpu"', 'accelerator="cpu", devices=2, strategy="ddp"')
    script = tmp_path / "train.py"
    script.write_text(f"{code}\nimport torch.distributed as dist\nassert dist.get_world_size() == 2\n")
    start = [] if name == "lightning" else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(guide.parents[2])}
    command = [sys.executable, *start, str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(" rows x ") == 2  # every rank answers
