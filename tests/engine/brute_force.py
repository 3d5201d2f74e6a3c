"""Training loops with all that each step saw, and the slow truth of it, dropout's masks included.

The truth never looks at masks: it runs the whole batch from the random state that the loop's own
forward pass began with, so that torch draws the same numbers once more, and differentiates one
example's clipped gradient after the other.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import TensorDataset

from tests.accounting.by_hand import Step, sums_by_hand
from tests.cases import DEVICE, relative_error
from tests.engine.loops import loader, physical_batches
from tests.engine.ways import start
from torchfil import FILPrivacyEngine
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.quantities import QuestionSpec, question_column
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.fisher import reference
from torchfil.fisher.masks import recorded_masks, replayed_masks
from torchfil.fisher.mechanism import step_divergence
from torchfil.questions import Absent, Question

SIGMA, C = 1e-9, 0.5
random_state = torch.cuda.get_rng_state if DEVICE == "cuda" else torch.get_rng_state
set_random_state: Callable[[Tensor], None] = (
    torch.cuda.set_rng_state if DEVICE == "cuda" else torch.set_rng_state
)
random_state_kept = torch.random.fork_rng


@dataclass
class Pass:
    """One forward pass of the loop: the random state and the weights before it, and its batch."""

    state: Tensor
    weights: dict[str, Tensor]
    x: Any
    y: Tensor
    ids: list[int]


@dataclass
class Run:
    engine: FILPrivacyEngine
    module: nn.Module
    plain: nn.Module  # a copy, of before it was made private
    model: Any
    optimizer: Any
    private: Any
    options: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Tensor] = F.cross_entropy  # of the loop
    true_loss: Callable[..., Tensor] = F.cross_entropy  # of one example
    noises: torch.Generator = field(default_factory=lambda: torch.Generator(DEVICE).manual_seed(5))
    passes: list[list[Pass]] = field(default_factory=list)  # of every logical step
    # Σ_i g̃_i of every step, [p]: the noise is taken off again
    released: list[Tensor] = field(default_factory=list)

    @property
    def noise_std(self) -> float:
        limits = self.options["max_grad_norm"]
        return float(
            self.options["noise_multiplier"]
            * (math.hypot(*limits) if isinstance(limits, list) else limits)
        )


def make(
    module: nn.Module,
    dataset: Any,
    *,
    batch_size: int = 4,
    learning_rate: float = 0.3,
    seed: int = 4,
    loading: dict[str, Any] | None = None,
    **options: Any,
) -> Run:
    """A run that is ready to train; the noise and the batches have generators of their own."""
    module.to(DEVICE)
    given: dict[str, Any] = {
        "noise_multiplier": SIGMA,
        "max_grad_norm": C,
        "seed": 3,
        "estimator": "exact",
    }
    given |= {
        "amplification": "none",
        "noise_generator": torch.Generator(DEVICE).manual_seed(5),
        **options,
    }
    plain = copy.deepcopy(module)
    torch.manual_seed(seed)
    private_options = {"poisson_sampling": True, "criterion": None, "lr": learning_rate, **given}
    engine, *private = start(
        module, loader(dataset, batch_size, **loading or {}), "auto", **private_options
    )
    run = Run(engine, module, plain, *private[:2], private[-1], given)
    if len(private) == 4:
        run.loss_fn = private[2]
    return run


def begin(run: Run, batch: Any) -> Pass:
    """What a pass over this batch begins with."""
    weights = {name: value.detach().clone() for name, value in run.module.state_dict().items()}
    if isinstance(batch, dict):
        x: Any = {name: value.to(DEVICE) for name, value in batch.items() if name != "labels"}
        y = batch["labels"].to(DEVICE)
    else:
        x, y = batch[0].to(DEVICE), batch[-1].to(DEVICE)
    return Pass(random_state(), weights, x, y, list(batch._ids))


def call(model: Any, x: Any) -> Any:
    return model(**x) if isinstance(x, dict) else model(x)


def take(
    run: Run,
    batch: Any,
    way: str = "auto",
    *,
    divisor: int = 1,
    first: bool = True,
    last: bool = True,
) -> Pass:
    """A forward and a backward pass and ``optimizer.step()``, or ``train_step``.

    What it began with.
    """
    begun = begin(run, batch)
    if way in ("train_step", "inputs alone"):
        run.engine.train_step(begun.x, *[begun.y] if way == "train_step" else ())
        return begun
    if first:
        run.optimizer.zero_grad()
    (run.loss_fn(call(run.model, begun.x), begun.y) / divisor).backward()
    if last:
        state = random_state()
        run.optimizer.step()
        assert torch.equal(random_state(), state), "the accounting draws from torch's own stream"
    return begun


def train(
    run: Run,
    *,
    steps: int = 3,
    way: str = "auto",
    physical: int | None = None,
    every: int = 1,
    divided: bool = False,
) -> Run:
    """So many logical steps.

    Every: after so many backward passes, of a loss that is divided by their number or not.
    """
    while len(run.passes) < steps:
        with physical_batches(run.private, run.optimizer, physical) as batches:
            pending: list[Pass] = []
            for batch in batches:
                first, last = (
                    not pending or physical is not None,
                    len(pending) + 1 == every or physical is not None,
                )
                pending.append(
                    take(run, batch, way, divisor=every if divided else 1, first=first, last=last)
                )
                if not last or run.optimizer.inside_logical_batch:
                    continue
                run.passes.append(pending)
                run.released.append(_released(run, every))
                pending = []
                if len(run.passes) == steps:
                    break
    return run


def _released(run: Run, every: int) -> Tensor:
    """The sum that the last step's p.grad was made of, [p], without the noise that it drew."""
    names = {id(value): name for name, value in run.module.named_parameters()}
    scale = (
        run.optimizer.expected_batch_size * every if run.optimizer.loss_reduction == "mean" else 1
    )
    sums = {}
    for p in run.optimizer.params:
        noise = torch.empty_like(p, memory_format=torch.contiguous_format)
        noise.normal_(0, run.noise_std, generator=run.noises)
        sums[names[id(p)]] = (p.grad * scale - noise).flatten()
    return torch.cat([sums[name] for name in names.values() if name in sums])


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Inside, neither cuDNN nor fused attention computes: they have no second derivative.

    Random numbers stay.
    """
    with (
        random_state_kept(),
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.cudnn.flags(enabled=False),
    ):
        yield


def clipped_gradient_of_one(
    module: nn.Module,
    begun: Pass,
    submodule: str | None = None,
    loss_fn: Callable[..., Tensor] = F.cross_entropy,
    **options: Any,
) -> tuple[Callable[[Tensor, int], Tensor], Tensor]:
    """g̃, [p], as a function of z and of the example's place in its batch, and the z of all,
    [batch, …].
    """
    at = copy.deepcopy(module)
    at.load_state_dict(begun.weights, strict=False)
    parameters = {
        name: value.detach() for name, value in at.named_parameters() if value.requires_grad
    }
    clip, limits = get_clip(options.get("clip", DEFAULT_CLIP)), options.get("max_grad_norm", C)
    weights, seen, offset = options.get("clip_weights"), list[Tensor](), list[Tensor]()
    if submodule is not None:
        at.get_submodule(submodule).register_forward_hook(
            lambda _module, _inputs, output: output + offset[0] if offset else seen.append(output)
        )
    with plain_kernels(), torch.no_grad(), recorded_masks() as masks:
        set_random_state(begun.state)
        call(at, begun.x)
    private = begun.x if submodule is None else torch.zeros_like(seen[0])
    # The same numbers, not the same state: inside transforms a layer's output may lie otherwise in
    # memory. (A GPU draws with and without gradients by different operations, and there the state
    # decides.)
    masks = masks if DEVICE == "cpu" else []

    def clipped(g: Tensor, limit: float) -> Tensor:
        square = g.square().sum()
        # its derivative is 0 at 0
        norm = torch.where(square == 0, 0.0, square.where(square > 0, 1.0).sqrt())
        return g.flatten() / clip.c(norm / clip.threshold(limit))

    def clipped_gradient(z: Tensor, i: int) -> Tensor:
        offset[:] = [torch.cat([private[:i], z[None], private[i + 1 :]])]
        x = offset[0] if submodule is None else begun.x

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            set_random_state(begun.state)
            with replayed_masks(masks):
                outputs = functional_call(at, parameters, *((), x) if isinstance(x, dict) else (x,))
            return loss_fn(outputs[i : i + 1], begun.y[i : i + 1])

        parts = list(grad(loss)(parameters).values())
        if isinstance(limits, list):
            g = torch.cat([clipped(part, limit) for part, limit in zip(parts, limits, strict=True)])
        else:
            g = clipped(torch.cat([part.flatten() for part in parts]), limits)
        return g if weights is None else float(weights[begun.ids[i]]) * g

    return clipped_gradient, private


def clipped_gradients(module: nn.Module, begun: Pass, *settings: Any, **options: Any) -> Tensor:
    """g̃ of a pass, [batch, p]; arguments as in :func:`clipped_and_jacobian`."""
    of_one, private = clipped_gradient_of_one(module, begun, *settings, **options)
    with plain_kernels():
        return torch.stack([of_one(row, i) for i, row in enumerate(private)]).detach()


def clipped_and_jacobian(
    module: nn.Module, begun: Pass, *settings: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """g̃, [batch, p], and ∂g̃/∂z, [batch, p, d], of a pass: one example at a time, within its whole
    batch.

    Args:
        module: The model without hooks, in the mode that it was trained in.
        begun: What the pass began with.
        settings: The submodule whose output is private (None: the input), and the loss of one
            example.
        options: clip, max_grad_norm (a list: for every parameter) and clip_weights, as given to
            make_private.
    """
    of_one, private = clipped_gradient_of_one(module, begun, *settings, **options)

    def twice(z: Tensor, i: int) -> tuple[Tensor, Tensor]:
        return (of_one(z, i),) * 2

    with plain_kernels():
        pairs = [jacrev(twice, has_aux=True)(row, i) for i, row in enumerate(private)]
    jacobians, values = map(torch.stack, zip(*pairs, strict=True))
    return values.detach(), jacobians.flatten(2).detach()


class Truth:
    """The sums of a run by jacrev of ωφ(‖g‖) g in float64, example by example; predicted and
    corrected by :mod:`tests.accounting.by_hand`.

    Args:
        run: Measured at every step, without sampling.
        earlier: The truth of the steps before.
        rank_of: By step, which rank can draw each example; None: there is one.

    Attributes:
        log: What every step adds, with Poisson's factors where the run takes them.
        fim: Σ I_t, [n, d, d], predicted and corrected like the next ones.
        diagonal: [n, d].
        trace: [n].
        divergences: By question, Σ KL_t, [n, answers], and as it is read: 0 for answers that made
            no difference.
        plis: Σ ∂(‖g̃‖/s)²/∂z, [n, d].
        squared_norm: Σ ‖g̃‖², [n].
        participations: [n].
        sums: Σ_i g̃_i of every step, [p].
        ratios: ‖g̃‖s⁻¹σ as last seen after every step, ω before it was seen, [n] each.
    """

    def __init__(
        self, run: Run, earlier: Truth | None = None, rank_of: Sequence[Tensor | None] | None = None
    ) -> None:
        ledger, given = run.engine.ledger, run.options
        n, d = ledger.num_examples, ledger.num_coordinates
        weights = given.get("clip_weights")
        ratio = torch.ones(n).double() if weights is None else weights.clone()
        self.log: list[Step] = [] if earlier is None else list(earlier.log)
        self.sums, self.ratios = [], list[Tensor]()
        for place, (passes, released) in enumerate(zip(run.passes, run.released, strict=True)):
            total, batches = torch.zeros_like(released), []
            for begun in passes:
                if not begun.ids:
                    continue
                batch, g = _contribution(run, begun)
                ratio[begun.ids] = g.norm(dim=1).cpu() * given["noise_multiplier"] / run.noise_std
                total += g.sum(dim=0)
                batches.append(batch)
            rank = None if rank_of is None else rank_of[place]
            self.log.append(Step(batches, given["noise_multiplier"], rank_of=rank))
            self.sums.append(total)
            self.ratios.append(ratio.clone())

        asked, rate = given.get("questions", {}), _rate(run)
        kept = ("diagonal", "fim", "plis")
        like = Ledger(n, d, track=kept, questions=specs(asked), draw_rate=rate)
        found = sums_by_hand(like, self.log)
        self.fim, self.diagonal, self.trace, self.plis, self.squared_norm, self.participations = (
            found[name]
            for name in ("fim", "diagonal", "trace", "plis", "squared_norm", "participations")
        )
        self.divergences = {name: as_read(ledger, self.log, name, found) for name in asked}


def specs(questions: Mapping[str, Question]) -> dict[str, QuestionSpec]:
    """What a ledger knows of these questions."""
    return {
        name: QuestionSpec(tuple(each.answers), membership=isinstance(each, Absent))
        for name, each in questions.items()
    }


def as_read(
    ledger: Ledger, log: Sequence[Step], question: str, found: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Σ KL_t of a question, and as it is read: 0 only for answers that never made a difference."""
    name = question_column(question)
    most = torch.zeros_like(found[name])
    for batch in [batch for step in log for batch in step.contributions]:
        most[batch.rows] = most[batch.rows].maximum(batch.columns[name]["value"])
    relative, last, changes = (
        ledger.sums[f"{name}_{part}"].cpu().double() for part in ("relative", "previous", "near")
    )
    unlike = (relative == 0) | (last > 1e-20) | (changes > 1e-40)
    assert bool(unlike[most > 0].all())
    return found[name], found[name].where(unlike, 0.0)


def _rate(run: Run) -> float | None:
    """q; None: batches are known."""
    amplification = run.options["amplification"]
    secret = amplification != "none" and run.options.get("poisson_sampling", True)
    return float(run.private.sample_rate) if secret else None


def _contribution(run: Run, begun: Pass) -> tuple[Contribution, Tensor]:
    """What a pass adds, by brute force, and its g̃, [batch, p]."""
    given, s, q = run.options, run.noise_std, _rate(run)
    submodule = given["private"].submodule if given.get("private") is not None else None
    clipping = {
        name: given[name] for name in ("clip", "max_grad_norm", "clip_weights") if name in given
    }
    g, jacobian = clipped_and_jacobian(run.plain, begun, submodule, run.true_loss, **clipping)
    amplification = given["amplification"]
    if q is None:
        fim = jacobian.mT @ jacobian / s**2
    elif hasattr(amplification, "factors"):  # the same factor in all directions
        factor = amplification.factors(torch.ones(1), q, given["noise_multiplier"])[0].item()
        fim = factor * (jacobian.mT @ jacobian) / s**2
    else:
        fim = reference.poisson_fim(jacobian, g, s, q)
    diagonal = fim.diagonal(dim1=1, dim2=2)
    columns = {
        "trace": diagonal.sum(dim=1),
        "diagonal": diagonal,
        "fim": fim,
        "plis": 2 * torch.einsum("bpd,bp->bd", jacobian, g) / s**2,
    }
    for name, question in given.get("questions", {}).items():
        found = []
        for other in question.alternatives(begun.x, begun.y):
            v = torch.zeros_like(g)
            if other is not None:
                at = replace(begun, x=other.inputs, y=other.targets)
                v = clipped_gradients(run.plain, at, submodule, run.true_loss, **clipping)
            products = [(a * b).sum(dim=1) / s**2 for a, b in ((g, g), (v, v), (g, v))]
            found.append(step_divergence(*products, q) / (q or 1))
        columns[question_column(name)] = torch.stack(found, dim=1)
    told = {name: {"value": value.cpu()} for name, value in columns.items()}
    rows = torch.tensor(begun.ids)
    return Contribution(rows, g.square().sum(dim=1).cpu(), told), g


def assert_released(run: Run, sums: list[Tensor], tolerance: float = 1e-6) -> None:
    """What every step released is that sum of clipped gradients."""
    norm = run.noise_std / run.options["noise_multiplier"]
    for released, total in zip(run.released, sums, strict=True):
        assert float((released - total).norm()) < tolerance * max(float(total.norm()), norm)


def assert_true(run: Run, tolerance: float = 1e-6) -> Truth:
    """Everything that the run keeps, and what it released, is that of brute force."""
    truth, engine = Truth(run), run.engine
    ledger = engine.ledger
    assert_released(run, truth.sums, tolerance)
    assert torch.equal(ledger.sums["participations"].cpu().double(), truth.participations)
    assert ledger.steps == len(run.passes)
    assert float(truth.trace.max()) > 0
    drawn, d = truth.participations > 0, truth.fim.shape[1]
    leaks = drawn & (truth.trace > 0)
    hidden = drawn & (truth.trace == 0)  # dropout may hide an example in every step
    fil, bound = engine.get_fil().value.cpu(), engine.get_mse_bound().value.cpu()
    assert torch.equal(fil.isnan(), ~(leaks | hidden))
    assert torch.isinf(bound[hidden]).all()
    assert not fil[hidden].any()
    expected = {
        "squared_norm": (ledger.sums["squared_norm"], truth.squared_norm),
        "trace": (engine.totals.get_trace().value, truth.trace),
        "FIL": (fil[leaks], (truth.trace / d).sqrt()[leaks]),
        "bound": (bound[leaks], d / truth.trace[leaks]),
    }
    if "fim" in ledger.sums:
        largest = torch.linalg.eigvalsh(truth.fim)[:, -1].clamp(min=0).sqrt()
        expected["fim"] = ledger.sums["fim"], truth.fim
        expected["spectral"] = engine.get_fil(kind="spectral").value, largest
    if "diagonal" in ledger.sums:
        expected["diagonal"] = ledger.sums["diagonal"], truth.diagonal
        attributes = engine.get_attribute_fil().value.cpu()
        told = (leaks | hidden)[:, None] & (ledger.sums["diagonal"].cpu() >= 0)
        assert torch.equal(attributes.isnan(), ~told)
        expected["attributes"] = attributes[told], truth.diagonal[told].clamp(min=0).sqrt()
    if "plis" in ledger.sums:
        expected["plis"] = engine.get_plis(), truth.plis
    for name, (total, read) in truth.divergences.items():
        expected[f"sum of {name}"] = ledger.sums[question_column(name)], total
        expected[name] = engine.get_guess(name).divergence.value.reshape(read.shape), read
    for name, (value, true) in expected.items():
        assert relative_error(value, true) < tolerance, name
    return truth


def images(count: int = 16, size: int = 4, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, size, size, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(classes, (count,), generator=generator))


def texts(count: int = 16, length: int = 4, vocabulary: int = 9, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (count, length), generator=generator)
    return TensorDataset(tokens, torch.randint(classes, (count,), generator=generator))
