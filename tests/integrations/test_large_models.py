"""The benchmark's large models, built tiny, take steps by every method of torchfil's."""

from __future__ import annotations

import pytest
import torch

from benchmarks.large import LARGE, LargeLoop


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_lora"])
def test_texts(name: str) -> None:
    for package in LARGE[name].needs:
        pytest.importorskip(package)
    for precision in LARGE[name].precisions:
        for method in ("loop", "train_step"):
            loop = LargeLoop(LARGE[name], method, 1, precision, "cpu", small=True)
            loop.step()
            assert float(loop.engine.get_fil().value.max()) > 0
            assert all(torch.isfinite(value).all() for value in loop.module.parameters())
