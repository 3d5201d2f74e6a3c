"""Does the recorded pass fit a model? A trial with two examples, compared with plain backward
passes of each.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchfil.fisher import models
from torchfil.fisher.gradients import ExampleGradients, ModelFacts, flatten
from torchfil.fisher.recording.graphs import release_memory
from torchfil.fisher.recording.jacobian import Cotangents, cut, term_of, weighted_sum
from torchfil.fisher.recording.record import Recording, learn_layouts, record, watch_parameters
from torchfil.fisher.rules.base import Call
from torchfil.fisher.rules.convolution import ConvolutionRule
from torchfil.fisher.rules.parameters import GenericRule, ParameterRule, share_roles
from torchfil.utils.given import Args, Kwargs

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_PROBE_SEED = 1
_CANDIDATES = 8  # rows searched for two examples with a gradient
_MOST_NAMES = 4
_FAR_ENOUGH = 0.1  # of a parameter's size
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
_ROUNDING = 1e-2  # a tolerance that rounding in bfloat16 and float16 keeps
NOT_FINITE = "the gradient of an example of the trial is NaN or infinite"
_ROUNDED = (
    "the trial did not run in float64, and in the model's own bfloat16 or float16 rounding alone "
    "can explain what it found: weights in float32, or more memory at the first step, show "
    "whether the recorded pass fits"
)


@dataclass(frozen=True)
class Plan:
    """What a trial with two examples found.

    Attributes:
        reason: Why the recorded pass does not fit this model; None: it does.
        bytes_per_example: The memory that the pass holds for one example.
        generic: The layers without their own rule, by name and kind; their gradients are formed one
            by one.
        convolutions: The share of convolutions among the layers.
        facts: What passes over the model have shown; passes of this plan add to it.
    """

    reason: str | None
    bytes_per_example: int
    generic: tuple[str, ...] = ()
    convolutions: float = 1.0
    facts: ModelFacts = field(default_factory=ModelFacts, compare=False)

    @property
    def fits(self) -> bool:
        """Whether the recorded pass serves the model."""
        return self.reason is None


def plan(gradients: ExampleGradients) -> Plan:
    """Try the pass on two examples: does it agree with plain backward passes, and how much memory
    does it hold?

    The trial compares ‖g‖², ∇‖g‖², Jᵀu for one vector u, and the sum of g. This finds parameters
    that the model uses outside their modules, models that mix or sort examples, and wrong layer
    rules. Three things could hide such faults:

    * Examples without a gradient, or two equal ones: the trial looks for others. It passes them as
      a, b, a, an order that sorting would change.
    * Weights at which a part of the gradient vanishes (layers that start at 0): the trial is
      repeated nearby.
    * Rounding: a wrong second derivative may pass a comparison in float32, and the gradient of a
      well-learned example is a difference of nearly equal numbers. The trial therefore runs in
      float64, and in the model's own dtype only if the model does not run in float64.
    """
    if gradients.dtype != torch.float64:
        try:
            return _tried_in_double(gradients)
        except Exception as error:
            # a kernel without float64, or too little memory: use the model's own dtype
            logger.info("the trial does not run in float64: %s", error)
        release_memory()  # only here is the error gone, whose traceback held the float64 copy
    try:
        return _tried(gradients, gradients.dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # mapping over examples may still work, or will report the error
        return Plan(str(error) or type(error).__name__, 0, facts=gradients.facts)


def _tried_in_double(gradients: ExampleGradients) -> Plan:
    with _in_double(gradients) as doubled:
        return _tried(doubled, gradients.dtype)


def _tried(gradients: ExampleGradients, dtype: torch.dtype) -> Plan:
    """The plan from a trial in the gradients' dtype, for passes in ``dtype``; errors are raised."""
    # a normal vector, drawn on the gradients' device: a CPU needs half a second for a hundred
    # million numbers
    source = torch.Generator(gradients.device).manual_seed(_PROBE_SEED)
    probe = torch.randn(gradients.num_parameters, generator=source, device=gradients.device).to(
        gradients.dtype
    )
    products = cache(partial(gradients.plain_products_of_one, u=probe))
    rows = _telling_rows(gradients, lambda row: bool(products(row)[0].any()))
    plain = _Plain.of(products, rows)
    part = replace(
        gradients, examples=gradients.examples[torch.tensor(rows, device=gradients.device)]
    )
    learned = True
    while learned:
        recorded = _recorded(part, probe)
        reason, missing = _difference(part, recorded, plain)
        # a dimension of the batch's size may be another one
        learned = reason is not None and learn_layouts(part)
        learned = learned or (bool(missing) and watch_parameters(part, missing))
    if reason is None and not all(
        bool(g.any()) for g in part.unflatten(plain.gradients.abs().sum(dim=0)).values()
    ):
        # a trial says nothing about a parameter without a gradient
        reason = _difference_nearby(part, probe)
    if reason is not None:
        return Plan(reason, 0, facts=gradients.facts)

    rules = {
        call.module: call.rule
        for call in recorded.calls
        if not isinstance(call.rule, ParameterRule)
    }
    convolutions = sum(isinstance(rule, ConvolutionRule) for rule in rules.values())
    size = 2 * recorded.held * dtype.itemsize // (gradients.dtype.itemsize * len(part.examples))
    generic = tuple(
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in part.model.named_modules()
        if isinstance(rules.get(module), GenericRule)
    )
    return Plan(None, size, generic, convolutions / max(1, len(rules)), gradients.facts)


class _Plain(NamedTuple):
    """Results of plain backward passes: g, [rows, p], ∇‖g‖² and Jᵀu, [rows, d]."""

    gradients: Tensor
    slopes: Tensor
    products: Tensor

    @classmethod
    def of(cls, products: Callable[[int], tuple[Tensor, ...]], rows: Sequence[int]) -> _Plain:
        """The results for these rows, one by one."""
        return cls(*map(torch.stack, zip(*map(products, rows), strict=True)))


@dataclass(frozen=True)
class _Recorded:
    """Results of a recorded pass: ‖g‖², [rows], ∇‖g‖² and Jᵀu, [rows, d], Σ g, [p], its calls and
    the bytes it held.

    ``narrow`` says whether it computed with fewer digits than float32 has.
    """

    squares: Tensor
    slopes: Tensor
    products: Tensor
    summed: Tensor
    calls: tuple[Call, ...]
    held: int
    narrow: bool


def _telling_rows(gradients: ExampleGradients, has_gradient: Callable[[int], bool]) -> list[int]:
    """Rows a, b, a of two different examples with gradients, if there are such.

    If there is one example, its row.
    """
    count = len(gradients)
    spread = [round(k * (count - 1) / max(1, _CANDIDATES - 1)) for k in range(_CANDIDATES)]
    candidates = list(dict.fromkeys([0, count - 1, *spread]))

    tensors = (gradients.examples.z, *gradients.examples.tensors)
    telling: list[int] = []
    for row in candidates:
        known = any(
            all(torch.equal(leaf[row], leaf[other]) for leaf in tensors) for other in telling
        )
        if not known and has_gradient(row):
            telling.append(row)
        if len(telling) == 2:
            break

    telling = list(dict.fromkeys([*telling, *candidates]))[:2]
    return [*telling, telling[0]] if count > 1 else telling


def _difference_nearby(part: ExampleGradients, probe: Tensor) -> str | None:
    """The difference at slightly changed weights.

    None also if the model has no finite gradient there.
    """
    source = torch.Generator(part.device).manual_seed(_PROBE_SEED)

    def moved(value: Tensor) -> Tensor:
        size = float(value.square().mean().sqrt()) or 1.0
        step = torch.randn(value.shape, generator=source, device=value.device).to(value.dtype)
        return value + _FAR_ENOUGH * size * step

    near = replace(part, parameters={name: moved(value) for name, value in part.parameters.items()})
    plain = _Plain.of(partial(near.plain_products_of_one, u=probe), range(len(near)))
    if not all(bool(value.isfinite().all()) for value in plain):
        return None
    return _difference(near, _recorded(near, probe), plain)[0]


def _difference(
    part: ExampleGradients, recorded: _Recorded, plain: _Plain
) -> tuple[str | None, list[str]]:
    """What the recorded pass and plain backward passes disagree on (None: nothing), and the
    parameters it misses.
    """
    found = _apart(part, recorded, plain, _TOLERANCE.get(plain.gradients.dtype, 1e-3))
    if found[0] is None or not recorded.narrow:
        return found
    beyond_rounding = _apart(part, recorded, plain, _ROUNDING)
    return (_ROUNDED, []) if beyond_rounding[0] is None else beyond_rounding


def _apart(
    part: ExampleGradients, recorded: _Recorded, plain: _Plain, tolerance: float
) -> tuple[str | None, list[str]]:
    """:func:`_difference`, by more than this tolerance."""
    squares, summed = plain.gradients.square().sum(dim=1), plain.gradients.sum(dim=0)
    if not squares.isfinite().all():
        return NOT_FINITE, []
    if not torch.allclose(
        recorded.squares, squares, rtol=tolerance, atol=tolerance * float(squares.max())
    ):
        apart = part.unflatten(recorded.summed - summed)
        sizes = {name: float(torch.linalg.vector_norm(value)) for name, value in apart.items()}
        names = [name for name, size in sizes.items() if size > tolerance * max(sizes.values())]
        listed = (
            f" of {', '.join(names[:_MOST_NAMES])}{', …' if len(names) > _MOST_NAMES else ''}"
            if names
            else ""
        )
        return (
            f"the layers' calls do not account for the whole gradient{listed}, or the model mixes "
            "examples",
            names,
        )

    pairs = {
        "sums of gradients": (recorded.summed[None], summed[None]),
        "derivatives of gradients' norms": (recorded.slopes, plain.slopes),
        "derivatives of gradients' products with a probe": (recorded.products, plain.products),
    }
    for name, (fast, true) in pairs.items():
        distance, size = (torch.linalg.vector_norm(values, dim=1) for values in (fast - true, true))
        if not (distance <= 10 * tolerance * size.max()).all():
            return (
                f"plain backward passes give other {name}: a layer's rule is wrong, or the model "
                "mixes examples",
                [],
            )
    return None, []


def _recorded(part: ExampleGradients, probe: Tensor) -> _Recorded:
    """Everything that the trial compares, from one recorded pass."""
    z = part.examples.z.detach().requires_grad_()
    held = _Held([*part.parameters.values(), *part.constants.values()])
    with torch.enable_grad(), part.backward_state():
        with held.counting():
            recording = record(part, z)
        attached = cut(recording)
        square = attached.squared_norm(held.term)
        held.total += held.largest + sum(
            leaf.numel() * leaf.itemsize for leaf in attached.origins.values()
        )
        cotangents: Cotangents = {}
        square.add_derivative(cotangents)
        slopes = attached.pulled_back(cotangents).detach()
        _, cotangents = attached.inner_products(part.unflatten(probe))
        products = attached.pulled_back(cotangents).detach()
        sums = weighted_sum(recording, torch.ones(len(part), dtype=part.dtype, device=part.device))

    summed = flatten(
        {name: sums.get(name, torch.zeros_like(value)) for name, value in part.parameters.items()}
    )
    return _Recorded(
        square.total, slopes, products, summed, recording.calls, held.total, recording.narrow
    )


class _Held:
    """Bytes that autograd keeps for backward passes, not counting the weights.

    Attributes:
        total: The bytes kept at the same time.
        largest: The bytes of the largest term of ‖g‖²; each is freed before the next.
    """

    def __init__(self, weights: list[Tensor]) -> None:
        self.total = self.largest = 0
        self._known = {weight.untyped_storage().data_ptr() for weight in weights}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the bytes kept inside this context."""

        def pack(tensor: Tensor) -> Tensor:
            pointer = tensor.untyped_storage().data_ptr()
            if pointer not in self._known:
                self._known.add(pointer)
                self.total += min(
                    tensor.untyped_storage().nbytes(), tensor.numel() * tensor.itemsize
                )
            # attached, a node that keeps its own result would keep itself alive
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def term(self, recording: Recording, calls: Sequence[Call]) -> Tensor:
        """A term of ‖g‖², counted."""
        before = self.total
        generic = [call for call in calls if isinstance(call.rule, GenericRule)]
        if generic:  # such hooks do not work there; estimate two gradients per example
            value = term_of(recording, calls)
            for call in generic:
                size = sum(weight.numel() * weight.itemsize for weight in call.parameters.values())
                self.total += 2 * size * len(call.delta)
        else:
            with self.counting():
                value = term_of(recording, calls)
        self.largest, self.total = max(self.largest, self.total - before), before
        return value


class _CastsToDouble(TorchFunctionMode):
    """Inside, a cast to a narrower floating-point type becomes a cast to float64.

    Models contain casts: Llama casts to float32 in RMSNorm and for rotary positions, and masks have
    a fixed type.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        def widened(value: object) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value

        func = Tensor.double if func in _CASTS else func
        return func(
            *map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()}
        )


@contextlib.contextmanager
def _in_double(gradients: ExampleGradients) -> Iterator[ExampleGradients]:
    """The same examples and weights in float64, whatever casts the model contains: rounding errors
    are not compared.

    The model is a throw-away copy: a module may keep a tensor of its first call. Changes that it
    makes to its buffers are copied to the original buffers.
    """
    model = models.copy_without_weights(gradients.model, keep_hooks=True)
    share_roles(gradients.model, model)
    doubled = replace(gradients.double(), model=model)
    try:
        with _CastsToDouble():
            yield doubled
    finally:
        gradients.facts.layers.pop(model, None)
        for name, value in gradients.constants.items():
            copy = doubled.constants[name]
            if copy is not value and copy._version > 0:
                value.copy_(copy)
