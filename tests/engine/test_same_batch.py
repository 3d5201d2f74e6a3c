"""Whether a step is on the batch that was read last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import grouped
from tests.engine.ways import LOSS, WAYS, examples, mlp, start, step
from torchfil import FILPrivacyEngine, Private


@pytest.mark.parametrize("way", ["hooks", "train_step"])
def test_a_batch_that_is_used_again_after_an_empty_one_is_refused(way: str) -> None:
    engine = FILPrivacyEngine()
    module, (x, y) = mlp(), examples()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=1, generator=torch.Generator().manual_seed(0))
    model, optimizer, private = engine.make_private(
        module, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0, criterion=LOSS
    )
    last = None
    for inputs, targets in private:
        if len(targets) > 1:
            last = inputs, targets
        elif not len(targets) and last is not None:
            with pytest.raises(RuntimeError, match="0 examples were seen"):
                step(engine, model, optimizer, *last, way)
            return
    pytest.fail("no empty batch was drawn")


def test_a_tuple_that_was_read_before_is_told_from_the_last_one() -> None:
    def as_tuple(samples: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    engine = FILPrivacyEngine()
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(*examples()), batch_size=6, collate_fn=as_tuple)
    options: dict[str, Any] = {"poisson_sampling": False, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    _, _, private = engine.make_private(module, optimizer, loader, **grouped(criterion=LOSS, **options))
    batches = iter(private)
    x, y = next(batches)
    _, _ = next(batches)
    with pytest.raises(RuntimeError, match="read before the last one"):
        engine.train_step(x.clone(), y.clone())


def test_labels_of_a_single_class_say_nothing_about_which_batch_it_is() -> None:
    x, y = examples()
    y[:6] = 0
    engine, *_, loader = start(mlp(), (x, y))
    for inputs, targets in loader:
        engine.train_step(inputs + 0.1, torch.zeros_like(targets))  # augmented and relabelled
    assert engine.leakage()["participations"].tolist() == [1] * 24


@pytest.mark.parametrize("way", WAYS)
def test_the_loaders_own_dict_as_the_models_argument(way: str) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            """Of a dict."""
            result: Tensor = self.inner(batch["x"] + 0 * batch["labels"][:, None])
            return result

    def as_dict(samples: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}

    engine, module = FILPrivacyEngine(), Reads()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(*examples()), batch_size=6, collate_fn=as_dict)
    model, optimizer, private = engine.make_private(
        module,
        optimizer,
        loader,
        poisson_sampling=False,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=LOSS,
        private=Private(submodule="inner.0"),
        grad_sample_mode="auto" if way == "auto" else "hooks",
    )
    for batch in private:
        if way == "train_step":
            engine.train_step((batch,), batch["labels"])
        else:
            optimizer.zero_grad()
            LOSS(model(batch), batch["labels"]).backward()
            optimizer.step()
    assert bool((engine.get_fil().value > 0).all())
