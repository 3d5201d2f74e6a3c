"""What newcomers are told about the likeliest mistakes, and refusals that Opacus's users know how
to catch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.validators import errors
from torch import nn
from torch.utils.data import IterableDataset

from tests.engine.loops import data, loader, make, network, step, train
from tests.test_cli import call, refused
from torchfil import FILPrivacyEngine
from torchfil.questions import Absent
from torchfil.utils.errors import UnsupportedModuleError

EPSILON = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 2}
UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("make_private", {"noise": 1.0}, "did you mean 'noise_multiplier'"),
    ("make_private", {"frobnicate": 1}, "'frobnicate'"),
    ("make_private_with_epsilon", {**EPSILON, "noise_multiplier": 1.0}, "'noise_multiplier'"),
    (
        "make_private_with_bound",
        {"epochs": 2, "target_mse_bound": 3, "noise_multiplier": 1},
        "'noise_multiplier'",
    ),
]


def private(called: str = "make_private", data_loader: Any = None, **options: Any) -> Any:
    module = network()
    given = (
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        loader(data(24)) if data_loader is None else data_loader,
    )
    return getattr(FILPrivacyEngine(), called)(*given, **options)


@pytest.mark.parametrize(("called", "options", "noun"), UNKNOWN, ids=str)
def test_an_unknown_option_is_refused(called: str, options: dict[str, Any], noun: str) -> None:
    with pytest.raises(TypeError, match=noun):
        private(called, **options)


class WebLoader(IterableDataset[Any]):
    """Looks like a loader, as WebDataset's and Fabric's do."""

    batch_size, dataset = 4, data(24)

    def __iter__(self) -> Any:
        return iter(self.dataset)


@pytest.mark.parametrize("given", [data(24).tensors, data(24), map(tuple, ()), WebLoader()])
def test_what_is_no_loader_is_refused(given: Any) -> None:
    methods = {
        "make_private": {},
        "make_private_with_epsilon": EPSILON,
        "make_private_with_bound": {"epochs": 1},
    }
    for called, options in methods.items():
        with pytest.raises(TypeError, match=f"Got {type(given).__name__}.*DataLoader"):
            private(called, given, **options)


def test_a_run_without_delta_folders_or_questions(tmp_path: Path) -> None:
    run = train(data(40), steps=2)
    engine, parts = run.engine, {"module": run.model, "optimizer": run.optimizer}
    for called in (engine.save_run, engine.report):
        with pytest.raises(TypeError) as no:
            called(tmp_path / "nothing")
        assert str(no.value) == f"{called.__name__} needs delta=, e.g. 1e-5."
    assert not list(tmp_path.iterdir())

    saved = engine.save_run(tmp_path / "a" / "b" / "run.parquet", delta=1e-5, hash_data=False)
    for path in (tmp_path / "e" / "f" / "run.pt", f"{tmp_path}/g/h/folder/"):
        engine.save_checkpoint(path=path, **parts)
        engine.load_checkpoint(path=path, **parts)
    compared = tmp_path / "k" / "l" / "compared.html"
    assert call("compare", saved, saved, "-o", compared).exit_code == 0
    assert compared.stat().st_mode & 0o777 == 0o600
    assert "Not a directory" in refused("report", saved, "-o", saved / "page")

    with pytest.raises(ValueError, match=r"^This run was trained without questions\."):
        engine.get_guess("member")
    asked = train(data(40), steps=1, questions={"member": Absent(), "other": Absent()}).engine
    with pytest.raises(ValueError, match="^This run was not asked 'membr'; did you mean 'member'"):
        asked.get_guess("membr")


def test_the_engines_refusal_is_opacus_error_too() -> None:
    """A frozen BatchNorm passes Opacus's check in eval mode.

    Put into training, the engine refuses it at the step.
    """
    norm = nn.BatchNorm1d(4).requires_grad_(False).eval()
    module = nn.Sequential(nn.Linear(5, 4), norm, nn.Tanh(), nn.Linear(4, 3)).double()
    _, _, model, optimizer, loader = make(module=module, poisson_sampling=False)
    norm.train()
    with pytest.raises(errors.UnsupportedModuleError, match="BatchNorm1d") as caught:
        step(model, optimizer, next(iter(loader)))
    assert isinstance(caught.value, UnsupportedModuleError)
    assert isinstance(caught.value, ValueError)
