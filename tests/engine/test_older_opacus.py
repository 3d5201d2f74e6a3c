"""What Opacus 1.5 does otherwise than 1.6: options that it lacks, and a function in its accountant's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
from opacus.accountants import RDPAccountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import FILPrivacyEngine
from torchfil.engine.options import options_known_to


@pytest.fixture
def older_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    """State dicts as in Opacus 1.5: the mechanism is a bound method, not its name."""

    def state_dict(self: RDPAccountant, destination: Any = None) -> dict[str, Any]:
        return {"history": list(self.history), "mechanism": type(self).mechanism}

    def load_state_dict(self: RDPAccountant, state: dict[str, Any]) -> None:
        if type(self).mechanism != state["mechanism"]:
            raise ValueError("another mechanism")
        self.history = state["history"]

    monkeypatch.setattr(RDPAccountant, "state_dict", state_dict)
    monkeypatch.setattr(RDPAccountant, "load_state_dict", load_state_dict)


@pytest.fixture
def older_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opacus's engine as in 1.5, which cannot fill empty batches."""
    original = opacus.PrivacyEngine._prepare_data_loader

    def prepare(self: Any, data_loader: Any, *, poisson_sampling: bool, distributed: bool) -> Any:
        return original(self, data_loader, poisson_sampling=poisson_sampling, distributed=distributed)

    monkeypatch.setattr(opacus.PrivacyEngine, "_prepare_data_loader", prepare)


def start(**options: Any) -> tuple[FILPrivacyEngine, Any, Any, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = TensorDataset(torch.randn(12, 3), torch.randint(2, (12,)))
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "criterion": nn.CrossEntropyLoss(), "num_probes": 1}
    model, optimizer, loader = engine.make_private(
        module=module, optimizer=optimizer, data_loader=DataLoader(data, batch_size=4), **{**given, **options}
    )
    return engine, model, optimizer, loader


@pytest.mark.usefixtures("older_accountant")
def test_checkpoints_hold_plain_values(tmp_path: Path) -> None:
    engine, model, optimizer, loader = start()
    for x, y in loader:
        engine.train_step(x, y)
    path = tmp_path / "run.pt"
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    assert torch.load(path, weights_only=True)["privacy_accountant_state_dict"]["mechanism"] == "rdp"

    other, other_model, other_optimizer, _ = start()
    other.load_checkpoint(path=path, module=other_model, optimizer=other_optimizer)
    assert other.accountant.history == engine.accountant.history
    assert other.get_epsilon(1e-3) == engine.get_epsilon(1e-3)
    assert torch.equal(other.get_fil().value, engine.get_fil().value)


@pytest.mark.usefixtures("older_loader")
def test_what_opacus_lacks_is_left_out_or_refused() -> None:
    engine, _, _, loader = start(rand_on_empty=False)
    for x, y in loader:
        engine.train_step(x, y)
    assert engine.ledger is not None
    assert engine.ledger.steps == len(loader)
    with pytest.raises(ValueError, match=r"rand_on_empty=True needs a later Opacus .* 'opacus>=1.6', or leave it out"):
        start(rand_on_empty=True)


def test_a_model_that_is_to_stay_unwrapped() -> None:
    def prepare(module: nn.Module, *, batch_first: bool) -> None: ...

    assert options_known_to(prepare, {"batch_first": True, "wrap_model": True}) == {"batch_first": True}
    with pytest.raises(ValueError, match="wrap_model=False needs a later Opacus"):
        options_known_to(prepare, {"batch_first": True, "wrap_model": False})
