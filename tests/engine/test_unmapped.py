"""Models that torch.func does not run: one example after the other, compared with the same function that it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import DEVICE, relative_error
from tests.engine.loops import assert_same_run
from torchfil import Accounting, FILPrivacyEngine, fisher
from torchfil.fisher.gradients import ExampleGradients
from torchfil.utils.errors import UnsupportedModuleError


class Experts(nn.Module):
    """Two of three experts for each example; rows are sent to them, or all experts see all rows."""

    def __init__(self, mapped: bool) -> None:
        super().__init__()
        self.gate, self.mapped = nn.Linear(4, 3), mapped
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(4, 3), nn.Tanh()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(dim=-1).topk(2, dim=-1)
        if self.mapped:
            dense = (F.one_hot(chosen, 3) * weights[..., None]).sum(dim=1)  # [batch, experts]
            return torch.stack([dense[:, j : j + 1] * expert(x) for j, expert in enumerate(self.experts)]).sum(dim=0)
        out = torch.zeros(len(x), 3, dtype=x.dtype, device=x.device)
        for j, expert in enumerate(self.experts):
            rows, places = (chosen == j).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, places][:, None])
        return out


class OldTanh(torch.autograd.Function):
    """An autograd function without setup_context, as Bloom's GELU and peft's LoHa have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return delta * (1 - x.tanh().square())


class Bent(nn.Module):
    """A tanh that is called one way or the other, and a weight that some examples do not use."""

    def __init__(self, mapped: bool) -> None:
        super().__init__()
        self.first, self.head, self.unused = nn.Linear(4, 5), nn.Linear(5, 3), nn.Parameter(torch.ones(2))
        self.bend: Any = torch.tanh if mapped else OldTanh.apply

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.bend(self.first(x))))


def pair(kind: Any) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    models = [kind(mapped).to(DEVICE, torch.float64) for mapped in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    return *models, torch.randn(6, 4, dtype=torch.float64, device=DEVICE), (torch.arange(6) % 3).to(DEVICE)


@pytest.mark.parametrize("kind", [Experts, Bent])
def test_products_are_those_of_the_mapped_model(kind: Any) -> None:
    *models, x, y = pair(kind)
    ours, theirs = (ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y) for model in models)
    v, u = torch.randn(6, 4).to(x), torch.randn(6, ours.num_parameters).to(x)
    for name, *given in (
        ("gradients_and_losses",),
        ("jvp", v),
        ("vjp", u),
        ("vjp", u[0]),
        ("jacobian_columns", slice(1, 3)),
    ):
        for a, b in zip(getattr(ours, name)(*given), getattr(theirs, name)(*given), strict=True):
            assert relative_error(a, b) < 1e-12, name
    assert len(ExampleGradients.build(models[0], nn.CrossEntropyLoss(), x[:0], y[:0]).gradients()) == 0


@pytest.mark.parametrize("estimator", ["weight-probes", "exact"])
def test_a_run_with_rows_sent_to_experts(estimator: str) -> None:
    *models, x, y = pair(Experts)
    runs = []
    for model in models:
        engine = FILPrivacyEngine()
        private_model, optimizer, loader = engine.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.3),
            DataLoader(TensorDataset(x.cpu(), y.cpu()), batch_size=6),
            poisson_sampling=False,
            noise_generator=torch.Generator(DEVICE).manual_seed(5),
            accounting=Accounting(estimator=estimator, seed=3),
        )
        for a, b in loader:
            F.cross_entropy(private_model(a.to(DEVICE)), b.to(DEVICE)).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append((engine, model))
    assert_same_run(*runs, 1e-9)  # type: ignore[arg-type]


class Distances(nn.Module):
    def __init__(self, mapped: bool) -> None:
        super().__init__()
        self.centres, self.head, self.mapped = nn.Parameter(torch.randn(5, 4)), nn.Linear(5, 3), mapped

    def forward(self, x: Tensor) -> Tensor:
        far = (x[:, None] - self.centres).norm(dim=-1) if self.mapped else torch.cdist(x, self.centres)
        return torch.as_tensor(self.head(far.neg().exp()))


def test_an_operation_without_a_second_derivative_is_named_and_its_remedy_works() -> None:
    *models, x, y = pair(Distances)
    settings: Any = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(UnsupportedModuleError, match=r"_cdist_backward.*\(x\[:, None\] - y\).norm\(dim=-1\)"):
        fisher.fim_trace(models[0], nn.CrossEntropyLoss(), x, y, **settings)
    assert float(fisher.fim_trace(models[1], nn.CrossEntropyLoss(), x, y, **settings).value.min()) > 0


def test_weights_that_a_hook_computes_are_refused_and_the_remedy_works() -> None:
    data = DataLoader(TensorDataset(torch.randn(6, 4), torch.arange(6) % 3), batch_size=3)
    for norm in (torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm):
        with pytest.warns(FutureWarning) if norm is torch.nn.utils.weight_norm else torch.enable_grad():
            model = nn.Sequential(norm(nn.Linear(4, 3)), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if norm is torch.nn.utils.weight_norm:
            with pytest.raises(UnsupportedModuleError, match=r"Use torch.nn.utils.parametrizations.weight_norm"):
                FILPrivacyEngine().make_private(model, optimizer, data)
        else:
            FILPrivacyEngine().make_private(model, optimizer, data)


def test_graphs_with_all_nodes_in_one_tensor_are_refused() -> None:
    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)

        def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
            source, to = edges
            sums = torch.zeros(int(graph.max()) + 1, 3).index_add(0, graph, x.index_add(0, to, x[source]))
            return torch.as_tensor(self.head(sums))

    def collate(items: list[Any]) -> Any:
        edges = torch.cat([item[1] + 4 * k for k, item in enumerate(items)], dim=1)
        graph = torch.arange(len(items)).repeat_interleave(4)
        return torch.cat([item[0] for item in items]), edges, graph, torch.stack([item[2] for item in items])

    items: Any = [(torch.randn(4, 3), torch.randint(4, (2, 5)), torch.tensor(i)) for i in range(3)]
    module, engine = Graphs(), FILPrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        DataLoader(items, batch_size=3, collate_fn=collate),
        poisson_sampling=False,
    )
    for *inputs, y in loader:
        F.cross_entropy(model(*inputs), y).backward()
        with pytest.raises(ValueError, match=r"\(12, 3\), \(2, 15\).*pad graphs or sets to one size"):
            optimizer.step()
