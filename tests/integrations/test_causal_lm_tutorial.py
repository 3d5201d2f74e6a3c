"""The tutorial on a causal language model with LoRA, from top to bottom with smaller settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.test_notebooks import RUNNER, SMALL, TUTORIALS

pytest.importorskip("transformers", reason="transformers is not installed (torchfil[huggingface])")
pytest.importorskip("peft", reason="peft is not installed (torchfil[peft])")


def test_secrets_are_bounded_and_adapters_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = RUNNER.run_notebook(
        TUTORIALS / "causal-lm-lora.md", SMALL["causal-lm-lora"], tmp_path / "pictures"
    )
    # the adapters that were switched off
    assert "trainable parameters changed" in capsys.readouterr().out
    assert min(names["moved"]) > 0
    assert 0.1 <= names["bound"] <= 1
    divergence = names["engine"].get_guess("code word").divergence.value
    asked, others = (
        divergence[: names["CLIENTS"] + names["COPIES"]],
        divergence[names["CLIENTS"] + names["COPIES"] :],
    )
    assert others.count_nonzero() == 0  # a note without a code word has no other answer
    true = torch.tensor(
        [names["ANIMALS"].index(names["private"][row][names["PLACE"]]) for row in range(len(asked))]
    )
    drawn = torch.tensor(names["engine"].leakage()["participations"].to_numpy()[: len(asked)] > 0)
    assert asked.gather(1, true[:, None]).count_nonzero() == 0
    assert bool((asked[drawn].count_nonzero(dim=1) == 9).all())
