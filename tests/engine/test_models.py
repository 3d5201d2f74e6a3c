"""Models and batches of all kinds, each against exact Jacobians at the recorded weights."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, TensorDataset

from tests.cases import DEVICE, GroupNormResidual, TinyTransformer, grouped, relative_error
from tests.engine.loops import SIGMA, C, loader, network
from torchfil import FILPrivacyEngine, Private
from torchfil.clipping import get_clip
from torchfil.fisher import ClippedJacobian, ExampleGradients, reference
from torchfil.fisher.masks import call_and_record_masks
from torchfil.fisher.recording import RecordedJacobian

pytestmark = pytest.mark.torch_versions


def account(
    module: nn.Module, dataset: Any, call: Any, as_arguments: Any, *, steps: int = 3, **options: Any
) -> tuple[FILPrivacyEngine, Tensor]:
    """Train for a few steps; the traces that exact Jacobians at the weights of each step add up to."""
    engine = FILPrivacyEngine()
    module.to(DEVICE)
    optimizer: Any = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.3)
    options = {"noise_multiplier": SIGMA, "max_grad_norm": C, "estimator": "exact", "amplification": "none", **options}
    plain = copy.deepcopy(module)
    model, optimizer, private = engine.make_private(module, optimizer, loader(dataset, 4), **grouped(**options))
    traces = torch.zeros(len(dataset), dtype=torch.float64)
    for step, batch in enumerate(private):
        if step == steps:
            break
        plain.load_state_dict(module.state_dict())
        optimizer.zero_grad()
        ids = batch._ids
        moved = pytree.tree_map(lambda leaf: leaf.to(DEVICE), dict(batch) if isinstance(batch, dict) else list(batch))
        call(model, moved).backward()
        if ids:
            inputs, targets = as_arguments(moved)
            fim = reference.exact_fim(
                plain,
                options.get("criterion", nn.CrossEntropyLoss()),
                inputs,
                targets,
                max_grad_norm=C,
                noise_multiplier=SIGMA,
                private=options.get("private"),
            )
            traces[ids] += torch.einsum("bii->b", fim).cpu()
        optimizer.step()
    return engine, traces


def classify(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def images(n: int = 20) -> TensorDataset:
    return TensorDataset(torch.randn(n, 2, 4, 4).double(), torch.randint(3, (n,)))


def test_sequential_cnn() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    ).double()
    engine, want = account(module, images(), classify, tuple)
    assert relative_error(engine.totals.get_trace().value, want) < 1e-6


def test_group_norm_residual_net() -> None:
    torch.manual_seed(0)
    engine, want = account(GroupNormResidual().double(), images(), classify, tuple)
    assert relative_error(engine.totals.get_trace().value, want) < 1e-6


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, left: Tensor, *, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(left) + self.right(right)))


class DictData(Dataset[Any]):
    def __init__(self, n: int = 20) -> None:
        self.left, self.right = torch.randn(n, 3).double(), torch.randn(n, 2).double()
        self.kind = torch.randint(3, (n,))

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"left": self.left[i], "right": self.right[i], "kind": self.kind[i]}


@pytest.mark.parametrize("private", [None, Private(inputs="right")])
def test_keyword_inputs_and_dict_batches(private: Private | None) -> None:
    torch.manual_seed(0)

    def split(batch: Any) -> Any:
        return {"left": batch["left"], "right": batch["right"]}, batch["kind"]

    engine, want = account(
        Keywords().double(),
        DictData(),
        lambda model, batch: F.cross_entropy(model(left=batch["left"], right=batch["right"]), batch["kind"]),
        split,
        batch_to_inputs=split,
        private=private,
    )
    assert relative_error(engine.totals.get_trace().value, want) < 1e-6
    assert engine.totals.num_coordinates == (2 if private else 5)


def test_positional_and_keyword_inputs_together() -> None:
    torch.manual_seed(0)
    split = lambda batch: ({"left": batch["left"], "right": batch["right"]}, batch["kind"])  # noqa: E731
    engine, want = account(
        Keywords().double(),
        DictData(),
        lambda model, batch: F.cross_entropy(model(batch["left"], right=batch["right"]), batch["kind"]),
        split,
        batch_to_inputs=split,
    )
    assert relative_error(engine.totals.get_trace().value, want) < 1e-6


def test_dict_batches_without_a_split_raise_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"keys \['left', 'right', 'kind'\]; pass batch_to_inputs="):
        account(
            Keywords().double(),
            DictData(),
            lambda model, batch: F.cross_entropy(model(batch["left"], right=batch["right"]), batch["kind"]),
            lambda batch: ({"left": batch["left"], "right": batch["right"]}, batch["kind"]),
        )


def test_transformer_on_integer_tokens() -> None:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randint(11, (20, 4)), torch.randint(3, (20,)))
    from opacus.validators import ModuleValidator

    module = ModuleValidator.fix(TinyTransformer()).double()  # Opacus's own attention
    engine, want = account(module, dataset, classify, tuple, private=Private(submodule="embedding"))
    assert relative_error(engine.totals.get_trace().value, want) < 1e-6
    assert engine.totals.num_coordinates == 32


class Tokens(nn.Module):
    """Counts its calls, and may embed one token less than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)
        self.calls, self.shorter = 0, False

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        head: Tensor = self.head(self.embedding(tokens[:, int(self.shorter) :]).tanh().mean(dim=1))
        return head


def test_the_shape_of_a_submodules_output_is_read_once_for_every_length() -> None:
    torch.manual_seed(0)
    module = Tokens().to(DEVICE, torch.float64)
    tokens, kinds = torch.randint(11, (20, 6)), torch.randint(3, (20,))
    engine, private = FILPrivacyEngine(), Private(submodule="embedding")
    engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=loader(TensorDataset(tokens.to(DEVICE), kinds.to(DEVICE))),
        noise_multiplier=SIGMA,
        max_grad_norm=C,
        criterion=nn.CrossEntropyLoss(),
        private=private,
    )

    def calls(length: int) -> int:
        before = module.calls
        given = engine._training.replica.lay_out((tokens[:5, :length].to(DEVICE),), {}, kinds[:5].to(DEVICE), private)
        assert given.z.shape == (5, 4 * length)
        return module.calls - before

    assert [calls(length) for length in (6, 6, 4, 6, 4)] == [1, 0, 1, 0, 0]
    module.eval()
    assert [calls(length) for length in (6, 6)] == [1, 0]


def test_a_submodule_whose_output_changes_its_shape_is_refused() -> None:
    module = Tokens().to(DEVICE, torch.float64)
    tokens, kinds = torch.randint(11, (5, 6), device=DEVICE), torch.randint(3, (5,), device=DEVICE)
    loss_fn, private = nn.CrossEntropyLoss(), Private(submodule="embedding")
    gradients = ExampleGradients.build(module, loss_fn, tokens, kinds, private)
    module.shorter = True
    with pytest.raises(ValueError, match=r"'embedding' returned an output of shape \(1, 5, 4\) where \(6, 4\) was"):
        ClippedJacobian(gradients, get_clip("gelu"), 1.0)
    with pytest.raises(ValueError, match=r"of shape \(5, 5, 4\) where \(5, 6, 4\) was expected"):
        RecordedJacobian(gradients, get_clip("gelu"), 1.0)


def test_tokens_without_a_submodule_raise_with_the_remedy() -> None:
    dataset = TensorDataset(torch.randint(11, (20, 4)), torch.randint(3, (20,)))
    module = nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(16, 3)).double()
    with pytest.raises(ValueError, match=r"Private\(submodule=.*the model's embeddings are \['0'\]"):
        account(module, dataset, classify, lambda batch: tuple(batch))


def test_frozen_backbone_with_a_trainable_head() -> None:
    torch.manual_seed(0)
    module = network()
    module[0].requires_grad_(False)
    dataset = TensorDataset(torch.randn(20, 5).double(), torch.randint(3, (20,)))
    engine, want = account(module, dataset, classify, tuple)
    assert relative_error(engine.totals.get_trace().value, want) < 1e-6


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_lora_style_partial_training() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(LoRALinear(nn.Linear(5, 6), 2), nn.Tanh(), LoRALinear(nn.Linear(6, 3), 2)).double()
    dataset = TensorDataset(torch.randn(20, 5).double(), torch.randint(3, (20,)))
    engine, want = account(module, dataset, classify, tuple)
    assert relative_error(engine.totals.get_trace().value, want) < 1e-6


def test_private_regression_target() -> None:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(20, 5).double(), torch.randn(20, 2).double())
    engine, want = account(
        network(classes=2),
        dataset,
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        tuple,
        private=Private(target=True),
        criterion=nn.MSELoss(),
    )
    assert relative_error(engine.totals.get_trace().value, want) < 1e-6
    assert engine.totals.num_coordinates == 7


def test_unwrapped_model() -> None:
    torch.manual_seed(0)
    module = network()
    dataset = TensorDataset(torch.randn(20, 5).double(), torch.randint(3, (20,)))
    engine, want = account(module, dataset, lambda _hooks, batch: classify(module, batch), tuple, wrap_model=False)
    assert relative_error(engine.totals.get_trace().value, want) < 1e-6


def test_gradients_accumulated_over_two_batches() -> None:
    """Without Poisson sampling Opacus allows it: both batches are released under one draw of noise."""
    torch.manual_seed(0)
    module, plain = network(), network()
    dataset = TensorDataset(torch.randn(16, 5).double(), torch.randint(3, (16,)))
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, private = engine.make_private(
        module,
        optimizer,
        loader(dataset, 4),
        **grouped(noise_multiplier=SIGMA, max_grad_norm=C, poisson_sampling=False, estimator="exact"),
    )
    want = torch.zeros(16, dtype=torch.float64)
    for step, (x, y) in enumerate(private):
        x, y = x.to(DEVICE), y.to(DEVICE)
        F.cross_entropy(model(x), y).backward()
        plain.load_state_dict(module.state_dict())
        fim = reference.exact_fim(plain, nn.CrossEntropyLoss(), x, y, max_grad_norm=C, noise_multiplier=SIGMA)
        want[4 * step : 4 * step + 4] += torch.einsum("bii->b", fim).cpu()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert relative_error(engine.totals.get_trace().value, want) < 1e-6


class TestDropout:
    """The masks are those of the loop: unbiased for the mean over masks of the information given masks."""

    def module(self) -> nn.Sequential:
        base = network()
        return nn.Sequential(base[0], base[1], nn.Dropout(0.4), base[2]).double()

    def test_masks_are_the_same_in_every_pass_over_a_batch(self) -> None:
        module = self.module()
        x, y = torch.randn(4, 5).double().to(DEVICE), torch.randint(3, (4,)).to(DEVICE)
        gradients = ExampleGradients.build(module.eval(), nn.CrossEntropyLoss(), x, y)
        module.train()
        drawn = [call_and_record_masks(lambda: module(x), x.device, expected=True)[1] for _ in range(2)]
        first, second = (replace(gradients, examples=replace(gradients.examples, masks=masks)) for masks in drawn)
        assert torch.equal(first.gradients(), first.gradients())
        assert not torch.equal(first.gradients(), second.gradients())
        jacobian = first.jacobian_columns(slice(None))
        v = torch.randn(4, 5).double().to(DEVICE)
        assert torch.allclose(first.jvp(v), torch.einsum("bpd,bd->bp", jacobian, v), atol=1e-12)
        u = torch.randn(4, jacobian.shape[1]).double().to(DEVICE)
        assert torch.allclose(first.vjp(u), torch.einsum("bpd,bp->bd", jacobian, u), atol=1e-12)

    def test_unbiased_for_the_mean_over_masks(self) -> None:
        """One example, one step, many masks (of its copies in a batch, each its own), against explicit masks."""
        x, y = torch.randn(1, 5, generator=torch.Generator().manual_seed(0)).double(), torch.tensor([1])
        module = self.module()
        engine, copies = FILPrivacyEngine(), TensorDataset(x.repeat(150, 1), y.repeat(150))
        trained = copy.deepcopy(module)
        optimizer: Any = torch.optim.SGD(trained.parameters(), lr=0.0)
        model, optimizer, private = engine.make_private(
            trained,
            optimizer,
            loader(copies, 150),
            **grouped(noise_multiplier=SIGMA, max_grad_norm=C, estimator="exact", poisson_sampling=False),
        )
        torch.manual_seed(0)
        for a, b in private:
            F.cross_entropy(model(a.to(DEVICE)), b.to(DEVICE)).backward()
            optimizer.step()
        assert engine.get_fil().kind == "exact", "given the masks that were drawn"
        values = engine.totals.get_trace().value.cpu()

        class Masked(nn.Module):
            def __init__(self, mask: Tensor) -> None:
                super().__init__()
                self.first, self.last, self.mask = module[0], module[3], mask

            def forward(self, x: Tensor) -> Tensor:
                return self.last(torch.tanh(self.first(x)) * self.mask)

        total = 0.0
        for bits in range(2**6):
            keep = torch.tensor([(bits >> k) & 1 for k in range(6)]).double().to(DEVICE)
            probability = 0.6 ** keep.sum().item() * 0.4 ** (6 - keep.sum().item())
            fim = reference.exact_fim(
                Masked(keep / 0.6),
                nn.CrossEntropyLoss(),
                x.to(DEVICE),
                y.to(DEVICE),
                max_grad_norm=C,
                noise_multiplier=SIGMA,
            )
            total += probability * fim[0].trace().item()
        assert abs(values.mean().item() - total) < 4 * values.std().item() / len(values) ** 0.5
