"""Are lower ends valid under momentum and Adam? Many simulated runs at once, read by the library's
own ledger.

A tanh network with one hidden layer is trained by DP-SGD in many runs that differ only in their
batches and noise. Its traces are computed in closed form for every example at every step, whether
drawn or not, so the truth d / E[tr I] is known from the same runs. The ledger of each run records
the drawn examples, measured exactly. A lower end of a 95 % interval may lie above the truth for at
most 2.5 %; four percent are accepted.

OMP_NUM_THREADS=1 python -m benchmarks.coverage --simulate --runs 60
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from paper_data import small_digits
from torch import Tensor
from torch.nn import functional

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Leakage
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.quantities import Conditions, columns_of
from torchfil.fisher.batch import Measurement
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.results import Estimate

__all__ = ["SETTINGS", "Setting", "shares"]

CLIP = 1.0
MOST_EXPOSED = 0.05  # of the examples, by the truth


@dataclass(frozen=True)
class Setting:
    """How the simulated runs train; σ and C are 1.

    Attributes:
        data: "digits", or "random": six normal inputs, three classes by a noisy linear rule, ten
            outliers.
        optimizer: "SGD", "momentum" or "Adam".
        lr: The learning rate.
        sample_rate: q.
        steps: T.
        momentum: β, of SGD or Adam's first moment.
        num_examples: n.
    """

    data: str
    optimizer: str
    lr: float
    sample_rate: float
    steps: int
    momentum: float = 0.0
    num_examples: int = 100

    def __str__(self) -> str:
        name = (
            f"{self.optimizer} {self.momentum:g}"
            if self.optimizer == "momentum"
            else self.optimizer
        )
        return f"{self.data}, {name}, q = {self.sample_rate:g}, {self.steps} steps"


def _settings() -> Iterator[Setting]:
    rates = {"digits": (1.0, 0.1, 0.05, 0.03), "random": (0.6, 0.1, 0.03, 0.03)}
    for data, count in (("digits", 200), ("random", 100)):
        optimizers = (("SGD", 0.0), ("momentum", 0.9), ("momentum", 0.97), ("Adam", 0.9))
        for (optimizer, beta), lr in zip(optimizers, rates[data], strict=True):
            for q, steps in ((0.05, 400), (0.3, 80), (0.3, 320)):
                yield Setting(data, optimizer, lr, q, steps, beta, count)


SETTINGS = tuple(_settings())


def shares(setting: Setting, runs: int, *, seed: int = 0) -> dict[str, float]:
    """In percent, how many lower ends of one run are too high, and how low the ends are."""
    leakages, truth = _simulated(setting, runs, seed)
    bounds = [leakage.get_mse_bound() for leakage in leakages]
    low = torch.stack([bound.interval(0.95)[0] for bound in bounds])
    claimed, wrong = low > 0, low > truth
    exposed = (truth <= truth.quantile(MOST_EXPOSED)).expand_as(low)
    smallest = torch.tensor([leakage.get_smallest_mse_bound()[1] for leakage in leakages])
    return {
        "claimed": _percent(claimed),
        "too high": _percent(wrong[claimed]),
        "too high, most exposed 5 %": _percent(wrong[claimed & exposed]),
        "too high, end of the smallest": _percent(smallest > truth.min()),
        "median end over bound": float(
            (low / torch.stack([bound.value for bound in bounds]))[claimed].median()
        ),
    }


def _percent(flags: Tensor) -> float:
    return 100 * float(flags.double().mean())


def _data(setting: Setting) -> tuple[Tensor, Tensor, int]:
    """Inputs [n, d], one-hot labels [n, c], and the width of the hidden layer."""
    count = setting.num_examples
    if setting.data == "digits":
        x, y = small_digits()
        return x[:count].flatten(1), functional.one_hot(y[:count], 10).float(), 12
    source = torch.Generator().manual_seed(0)
    x, rule = torch.randn(count, 6, generator=source), torch.randn(6, 3, generator=source)
    y = (x @ rule + 0.5 * torch.randn(count, 3, generator=source)).argmax(dim=1)
    x[:5] *= 4
    y[5:10] = torch.randint(0, 3, (5,), generator=source)
    return x, functional.one_hot(y, 3).float(), 6


@dataclass
class _Weights:
    """The parameters of all runs, [runs, …] each, and the optimizer's moments."""

    values: list[Tensor]
    setting: Setting
    steps: int = 0
    first: list[Tensor] = field(default_factory=list)
    second: list[Tensor] = field(default_factory=list)

    @classmethod
    def start(cls, setting: Setting, runs: int, sizes: tuple[int, int, int]) -> _Weights:
        d, h, c = sizes
        source = torch.Generator().manual_seed(1)
        shapes = [((h, d), d), ((h,), d), ((c, h), h), ((c,), h)]
        values = [
            (2 * torch.rand(shape, generator=source) - 1) / fan_in**0.5 for shape, fan_in in shapes
        ]
        values = [value.expand(runs, *value.shape).clone() for value in values]
        return cls(
            values, setting, 0, *([torch.zeros_like(value) for value in values] for _ in range(2))
        )

    def step(self, gradients: list[Tensor]) -> None:
        self.steps += 1
        lr, beta, adam = self.setting.lr, self.setting.momentum, self.setting.optimizer == "Adam"
        for value, first, second, gradient in zip(
            self.values, self.first, self.second, gradients, strict=True
        ):
            first.mul_(beta).add_(gradient, alpha=1 - beta if adam else 1.0)
            if not adam:
                value.sub_(first, alpha=lr)
                continue
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            scale = (second / (1 - 0.999**self.steps)).sqrt() + 1e-8
            value.sub_(first / (1 - beta**self.steps) / scale, alpha=lr)


def _simulated(setting: Setting, runs: int, seed: int) -> tuple[list[Leakage], Tensor]:
    """What each run recorded, and d / E[tr I] of every example, [n]."""
    x, y, hidden = _data(setting)
    n, d, q = len(x), x.shape[1], setting.sample_rate
    weights = _Weights.start(setting, runs, (d, hidden, y.shape[1]))
    source = torch.Generator().manual_seed(seed)
    mechanism = Mechanism.build(CLIP, 1.0, "smooth", "poisson", q)
    ledger, trace = Ledger(runs * n, d), torch.zeros(runs, n, dtype=torch.float64)

    for _ in range(setting.steps):
        added, scale, norm, parts = _at(weights.values, x, y, mechanism)
        trace += q * added
        drawn = torch.rand(runs, n, generator=source) < q

        # as in the engine: a measured step is recorded for the examples that it drew
        rows = drawn.flatten().nonzero().flatten()
        measured = Measurement(
            {"trace": Estimate.exact(added.flatten()[rows])}, norm.flatten()[rows]
        )
        squared = (scale * norm).flatten()[rows].square()
        ledger.add(Contribution(rows, squared, columns=columns_of(measured)))

        # the release
        weight, (d1, d2, active) = (scale * drawn).float(), parts
        sums = [
            torch.einsum("rn,rnh,nd->rhd", weight, d1, x),
            torch.einsum("rn,rnh->rh", weight, d1),
            torch.einsum("rn,rnc,rnh->rch", weight, d2, active),
            torch.einsum("rn,rnc->rc", weight, d2),
        ]
        weights.step(
            [(each + CLIP * torch.randn(each.shape, generator=source)) / (q * n) for each in sums]
        )

    return [_run(ledger, run, setting) for run in range(runs)], d / trace.mean(dim=0)


def _run(ledger: Ledger, run: int, setting: Setting) -> Leakage:
    """One run's part of a ledger whose rows are the examples of all runs, run after run."""
    count = setting.num_examples
    part = Ledger(count, ledger.laid_out)
    part.steps = setting.steps
    for name in part.sums:
        part.sums[name].copy_(ledger.sums[name][run * count : (run + 1) * count])
    return Leakage(part, ExampleIds(count), Conditions(exact=True, sample_rate=setting.sample_rate))


def _at(
    values: list[Tensor], x: Tensor, y: Tensor, mechanism: Mechanism
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """tr I of a step, the clip factor, the norm, [runs, n] each, and (δ₁, δ₂, a), the pieces of the
    gradients.

    The gradient is (δ₁ ⊗ x, δ₁, δ₂ ⊗ a, δ₂). Derivatives by x of a, δ₂ and δ₁ are combinations of
    the rows of W₁, so their products need only those coefficients and the Gram matrix W₁W₁ᵀ, never
    a Jacobian.
    """
    w1, b1, w2, b2 = values
    along = torch.einsum("rhd,nd->rnh", w1, x)  # W₁x
    active = torch.tanh(along + b1[:, None])
    p = (torch.einsum("rch,rnh->rnc", w2, active) + b2[:, None]).softmax(dim=-1)
    d2, slope = p - y, 1 - active.square()
    back = torch.einsum("rch,rnc->rnh", w2, d2)
    d1 = back * slope
    x2, a2, e1, e2 = (
        x.square().sum(1),
        active.square().sum(-1),
        d1.square().sum(-1),
        d2.square().sum(-1),
    )
    squared_norm = e1 * (x2 + 1) + e2 * (a2 + 1)

    # ∂δ₂ and ∂δ₁ as coefficients on the rows of W₁, [runs, n, c or h, h]; ∂a = diag(slope) W₁
    gram = torch.einsum("rhd,rkd->rhk", w1, w1)
    logits = w2[:, None] * slope[:, :, None]
    of_d2 = p[..., None] * (logits - (p[..., None] * logits).sum(dim=2, keepdim=True))
    of_d1 = torch.einsum("rch,rnck->rnhk", w2, of_d2) * slope[..., None] - torch.diag_embed(
        2 * back * active * slope
    )

    def square(coefficients: Tensor) -> Tensor:
        return (torch.einsum("rnik,rkl->rnil", coefficients, gram) * coefficients).sum(dim=(2, 3))

    # tr JᵀJ, block by block, and Jᵀg = W₁ᵀ(coefficients) + e₁ x
    d1_row, d2_row = (
        torch.einsum("rnh,rnhk->rnk", d1, of_d1),
        torch.einsum("rnc,rnck->rnk", d2, of_d2),
    )
    a_row = active * slope
    whole = (
        square(of_d1) * (x2 + 1)
        + x.shape[1] * e1
        + 2 * (d1_row * along).sum(-1)
        + square(of_d2) * (a2 + 1)
    )
    whole = whole + e2 * (slope.square() * gram.diagonal(dim1=1, dim2=2)[:, None]).sum(-1)
    whole = whole + 2 * torch.einsum("rnk,rkl,rnl->rn", d2_row, gram, a_row)
    row = d1_row * (x2 + 1)[:, None] + d2_row * (a2 + 1)[..., None] + e2[..., None] * a_row
    along_gradient = square(row[:, :, None]) + e1.square() * x2 + 2 * e1 * (row * along).sum(-1)

    # clipping and subsampling, as everywhere: κ⊥ φ² JᵀPJ + κ∥ a aᵀ
    norm, radial = squared_norm.sqrt(), along_gradient / squared_norm
    scale, derivative = (
        mechanism.clip.scale(norm, CLIP),
        mechanism.clip.scale_derivative(norm, CLIP),
    )
    across, parallel = (
        each.reshape(norm.shape) for each in mechanism.weights((scale * norm).flatten())
    )
    added = (
        across * scale.square() * (whole - radial)
        + parallel * (scale + derivative * norm).square() * radial
    )
    return added.double(), scale, norm, (d1, d2, active)
