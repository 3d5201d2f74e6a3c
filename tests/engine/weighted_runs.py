"""Runs with a clip threshold for each example, and what they should say, by brute force."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import torch
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from torch import Tensor, nn

from tests.engine.brute_force import C, Run, make, train
from tests.engine.loops import data, network
from torchfil.fisher import reference
from torchfil.fisher.mechanism import step_divergence
from torchfil.questions import Absent, Label, Question

SIGMA = 0.9
N = 20
DELTA = 1e-5
ORDER = torch.randperm(N, generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.linspace(0.3, 1.0, N, dtype=torch.float64)[ORDER]
QUESTIONS: dict[str, Question] = {"member": Absent(), "label": Label(3)}


def weighted(way: str = "auto", steps: int = 3, weights: Any = WEIGHTS, **options: Any) -> Run:
    """A run of so many steps with weights, taken in that way."""
    options = {"criterion": nn.CrossEntropyLoss(), "clip_weights": weights, **options}
    if "hooks" in way:
        options["grad_sample_mode"] = "hooks"
    run = make(network(), data(N), batch_size=6, **options)
    return train(run, steps=steps, way=way, physical=2 if "physical" in way else None)


class Truth:
    """Sums over a run by jacrev of ωφ(‖g‖) g in float64, example by example.

    Attributes:
        fim: Σ I_t, [n, d, d].
        plis: Σ ∂(‖g̃‖/s)²/∂z, [n, d].
        squared_norm: Σ ‖g̃‖², [n].
        divergences: By question, Σ KL_t, [n, answers].
        sums: Σ_i g̃_i of every step, [p].
        ratios: ‖g̃‖/C as last seen after every step, ω before it was seen, [n] each.
    """

    def __init__(self, run: Run, weights: Tensor, sigma: float, q: float | None, clip: str = "smooth") -> None:
        n, d, s = len(weights), 5, sigma * C
        self.fim, self.plis = torch.zeros(n, d, d).double(), torch.zeros(n, d).double()
        self.squared_norm = torch.zeros(n).double()
        self.divergences = {name: torch.zeros(n, len(ask.answers)).double() for name, ask in QUESTIONS.items()}
        self.sums: list[Tensor] = []
        self.ratios: list[Tensor] = []
        ratio = weights.clone()
        for passes in run.passes:
            total: Any = 0.0
            for begun in passes:
                if not begun.ids:
                    continue
                at = copy.deepcopy(run.plain)
                at.load_state_dict(begun.weights)
                told = {"max_grad_norm": C, "clip": clip, "clip_weights": weights[begun.ids]}
                loss = nn.CrossEntropyLoss()
                g = reference.clipped_gradients(at, loss, begun.x, begun.y, **told)
                jacobian = reference.exact_jacobian(at, loss, begun.x, begun.y, **told)
                fim = jacobian.mT @ jacobian / s**2 if q is None else reference.poisson_fim(jacobian, g, s, q)
                self.fim[begun.ids] += fim.cpu()
                self.plis[begun.ids] += 2 * torch.einsum("bpd,bp->bd", jacobian, g).cpu() / s**2
                self.squared_norm[begun.ids] += g.square().sum(dim=1).cpu()
                ratio[begun.ids] = g.norm(dim=1).cpu() / C
                total = total + g.sum(dim=0)

                for name, question in QUESTIONS.items():
                    for k, other in enumerate(question.alternatives(begun.x, begun.y)):
                        v = torch.zeros_like(g)
                        if other is not None:
                            v = reference.clipped_gradients(at, loss, other.inputs, other.targets, **told)
                        products = [(a * b).sum(dim=1) / s**2 for a, b in ((g, g), (v, v), (g, v))]
                        self.divergences[name][begun.ids, k] += (step_divergence(*products, q) / (q or 1)).cpu()
            self.sums.append(total if isinstance(total, Tensor) else torch.zeros_like(run.released[0]))
            self.ratios.append(ratio.clone())


def epsilon_by_hand(ratios: list[float], sigma: float, q: float) -> float:
    """ε of one example from its ‖g̃‖/C at every step; σC/‖g̃‖ is rounded down to the grid, as documented."""
    rdp = sum(_rdp(sigma, math.floor(math.log(1 / ratio) / math.log(1.05) + 1e-5), q) for ratio in ratios)
    return float(get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=rdp, delta=DELTA)[0])


@cache
def _rdp(sigma: float, level: int, q: float) -> Any:
    orders = RDPAccountant.DEFAULT_ALPHAS
    return compute_rdp(q=q, noise_multiplier=sigma * 1.05**level, steps=1, orders=orders)


def rate_of(run: Run) -> float:
    rate = run.engine._training.run.options.sample_rate
    assert rate is not None
    return rate


def assert_equal(run: Run, other: Run) -> None:
    """Weights, ledger and ε, bit for bit."""
    for ours, theirs in zip(run.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    ours, theirs = (each.engine.ledger for each in (run, other))
    assert ours is not None
    assert theirs is not None
    assert ours.sums.keys() == theirs.sums.keys()
    for name, value in theirs.sums.items():
        assert torch.equal(ours.sums[name], value), name
    own = [each.engine.get_individual_epsilon([0, 4], delta=DELTA).value for each in (run, other)]
    assert torch.equal(*own)
    assert run.engine.get_epsilon(DELTA) == other.engine.get_epsilon(DELTA)
