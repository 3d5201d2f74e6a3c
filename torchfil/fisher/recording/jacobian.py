"""The clipped Jacobian's products with weight probes, from one recorded pass over the batch.

The recording is cut off from the graph that leads to z. ‖g‖² and ⟨g, u⟩ are functions of each
layer's input and δ, which are leaves there; one backward pass from the leaves' origins then gives
the derivatives with respect to z.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vmap

from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.models import probe_dtype, wide
from torchfil.fisher.operator import Jacobian, safe_reciprocal
from torchfil.fisher.recording.record import (
    RecordedForward,
    Recording,
    backward_pass,
    forward_pass,
    record,
)
from torchfil.fisher.rules.base import Call, UnsupportedCallError, products_of, total_square
from torchfil.utils.trees import map_tensors

logger = logging.getLogger(__name__)

Cotangents = dict[int, Tensor]  # by the leaf's id
Term = Callable[[Recording, Sequence[Call]], Tensor]


@dataclass(frozen=True)
class CutRecording:
    """A recording whose calls begin at leaves, so that the results of rules are differentiated only
    that far.

    Attributes:
        recording: The calls, with leaves as their inputs and δ.
        origins: By the leaf's id, the tensor that it replaces, still attached to z.
    """

    recording: Recording
    origins: dict[int, Tensor]

    def squared_norm(self, counted: Term | None = None) -> SquaredNorm:
        """‖g‖² of every example, with its derivatives at the leaves.

        Each term is differentiated in turn, so that only one layer's graph is in memory; light
        graphs are kept. ``counted`` evaluates the terms in place of :func:`term_of`.
        """
        total = torch.zeros_like(self.recording.losses)
        derivatives: list[tuple[tuple[Tensor, ...], Tensor | tuple[Tensor | None, ...]]] = []
        for calls in _terms(self.recording):
            with torch.enable_grad():
                value = (counted or term_of)(self.recording, calls)
            total = total + value.detach()
            if not value.requires_grad:
                continue
            leaves = tuple({id(leaf): leaf for call in calls for leaf in call.leaves}.values())
            plain = counted is None and len(calls) == 1 and not self.recording.narrow
            light = plain and calls[0].rule.squares_lightly(calls[0])
            derivatives.append((leaves, value if light else _derivatives(value, leaves)))
        return SquaredNorm(self, total, derivatives)

    def inner_products(self, direction: Mapping[str, Tensor]) -> tuple[Tensor, Cotangents]:
        """⟨g, u⟩ of every example, [batch], for u by parameter name, and the derivative of its sum
        at the leaves.
        """
        total = torch.zeros_like(self.recording.losses)
        cotangents: Cotangents = {}
        for call in self.recording.calls:
            part = {local: direction[name] for local, name in call.shared_names.items()}
            as_recorded = not self.recording.narrow or (
                call.rule.narrow_probes and probe_dtype.get() is not None
            )
            widened = call if as_recorded else call.wide()
            value, derivatives = call.rule.inner(widened, part)
            total = total + value
            for leaf, derivative in derivatives:
                self.put(cotangents, leaf if as_recorded else widened.origin(leaf), derivative)
        return total, cotangents

    def put(
        self,
        cotangents: Cotangents,
        leaf: Tensor,
        gradient: Tensor | None,
        weight: Tensor | None = None,
    ) -> None:
        """Add a gradient, times weights [batch], at the leaf's place.

        Do nothing if the leaf does not depend on z.
        """
        place = id(leaf)
        if gradient is None or place not in self.origins:
            return
        before = cotangents.get(place)
        if weight is None:
            cotangents[place] = gradient if before is None else before + gradient
            return
        each = weight.reshape(-1, *[1] * (gradient.ndim - 1))
        if before is not None and before.dtype == each.dtype == gradient.dtype:
            cotangents[place] = torch.addcmul(before, each, gradient)
        else:
            cotangents[place] = each * gradient if before is None else before + each * gradient

    def pulled_back(self, cotangents: Cotangents) -> Tensor:
        """Σ_leaf ⟨cotangent, ∂leaf/∂z⟩, [batch, d]; the graph is kept for further calls."""
        z, origins, given = self.recording.z, [], []
        for place, origin in self.origins.items():
            if place in cotangents:
                origins.append(origin)
                given.append(cotangents[place].to(origin.dtype))
        if not origins:
            return wide(torch.zeros_like(z))
        (result,) = torch.autograd.grad(
            origins, z, given, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return wide(result)


@dataclass(frozen=True)
class SquaredNorm:
    """‖g‖² of every example, [batch], and what is needed for its derivatives.

    Attributes:
        attached: The cut at which the derivatives end.
        total: ‖g‖².
        derivatives: For each term, its leaves, with its derivatives there or its value with the
            graph that leads there.
    """

    attached: CutRecording
    total: Tensor
    derivatives: Sequence[tuple[tuple[Tensor, ...], Tensor | tuple[Tensor | None, ...]]]

    def add_derivative(self, cotangents: Cotangents, weight: Tensor | None = None) -> None:
        """Add Σ_i weight_i ∂‖g_i‖²/∂leaf, for weights [batch] (None: 1); term by term."""
        for leaves, known in self.derivatives:
            weighted = isinstance(known, Tensor)
            parts = _derivatives(known, leaves, weight) if isinstance(known, Tensor) else known
            for leaf, derivative in zip(leaves, parts, strict=True):
                self.attached.put(cotangents, leaf, derivative, None if weighted else weight)


def _derivatives(
    value: Tensor, leaves: tuple[Tensor, ...], weight: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """∂(Σ_i weight_i value_i)/∂leaf; the graph is kept."""
    weight = torch.ones_like(value) if weight is None else weight.to(value.dtype)
    return torch.autograd.grad(value, leaves, weight, retain_graph=True, allow_unused=True)


def cut(recording: Recording) -> CutRecording:
    """The recording, cut off from the graph that leads to z.

    Raises:
        UnsupportedCallError: The first dimension of an input that depends on z does not run over
            the examples.
    """
    batch = recording.losses.shape
    by_origin: dict[int, Tensor] = {}

    def leaf(value: Tensor) -> Tensor:
        if not value.requires_grad:
            return value
        if value.shape[:1] != batch:
            raise UnsupportedCallError(
                f"{call.name}: an input of shape {tuple(value.shape)} is not one per example"
            )
        if id(value) not in by_origin:
            by_origin[id(value)] = value.detach().requires_grad_()
            origins[id(by_origin[id(value)])] = value
        return by_origin[id(value)]

    origins: dict[int, Tensor] = {}
    calls = []
    for call in recording.calls:
        args, kwargs = map_tensors(leaf, (call.args, dict(call.kwargs)))
        calls.append(replace(call, args=args, kwargs=kwargs, delta=leaf(call.delta), memo={}))
    return CutRecording(
        replace(recording, calls=tuple(calls), losses=recording.losses.detach()), origins
    )


def _terms(recording: Recording) -> list[tuple[Call, ...]]:
    """The calls of each term of ‖g‖².

    If several calls use a parameter, its gradient is summed over them first.
    """
    uses = Counter([name for call in recording.calls for name in call.shared_names.values()])
    terms: list[tuple[Call, ...]] = []
    sharing: list[Call] = []
    for call in recording.calls:
        if max(map(uses.__getitem__, call.shared_names.values())) == 1:
            terms.append((call,))
        else:
            sharing.append(call)
    return [*terms, tuple(sharing)] if sharing else terms


def term_of(recording: Recording, calls: Sequence[Call]) -> Tensor:
    """One term of ‖g‖², [batch]."""
    if len(calls) == 1 and len(set(calls[0].shared_names.values())) == len(calls[0].shared_names):
        call = calls[0].wide() if recording.narrow else calls[0]
        return call.rule.squared_norm(call)
    summed: dict[str, Tensor] = {}
    for call in calls:
        _add_gradients(summed, call)
    return total_square(summed.values(), recording.losses)


def _add_gradients(summed: dict[str, Tensor], call: Call) -> None:
    for local, gradient in call.rule.gradients(call.wide()).items():
        name = call.shared_names[local]
        summed[name] = summed[name] + gradient if name in summed else gradient


def squared_norm(recording: Recording) -> Tensor:
    """‖g‖² of every example, [batch], without derivatives."""
    with torch.no_grad():
        return sum(
            (term_of(recording, calls) for calls in _terms(recording)),
            torch.zeros_like(recording.losses),
        )


def gradient_products(own: Recording, other: Recording) -> Tensor:
    """‖g‖², ‖g′‖² and ⟨g, g′⟩, [3, batch], from a pass over the examples and one over changed
    examples.

    Raises:
        UnsupportedCallError: The model did not call the same layers in both passes.
    """
    if [call.name for call in own.calls] != [call.name for call in other.calls]:
        raise UnsupportedCallError(
            "the model calls other layers for an alternative answer than for the true one"
        )
    uses = Counter(name for call in own.calls for name in call.shared_names.values())
    total = own.losses.new_zeros(3, len(own.losses))
    shared: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    with torch.no_grad():
        for pair in zip(own.calls, other.calls, strict=True):
            if all(uses[name] == 1 for name in pair[0].shared_names.values()):
                total = total + pair[0].rule.products(*(call.wide() for call in pair))
                continue
            for call, summed in zip(pair, shared, strict=True):
                _add_gradients(summed, call)
        return total + products_of(*shared, own.losses)


def weighted_sum(recording: Recording, weight: Tensor) -> dict[str, Tensor]:
    """Σ_i weight_i g_i by the model's parameter names, for weights [batch]; not differentiable."""
    result: dict[str, Tensor] = {}
    for call in recording.calls:
        for local, part in call.rule.weighted_sum(
            call.wide() if recording.narrow else call, weight
        ).items():
            name = call.shared_names[local]
            result[name] = result[name] + part if name in result else part
    return result


class RecordedJacobian(Jacobian):
    """A :class:`Jacobian` that forms no gradient for norms and shared weight probes.

    Making it runs the pass: one forward and one backward pass are recorded. ‖g‖² and ⟨u, g⟩ are
    functions of each layer's inputs and output gradients in them, and one more backward pass
    through both gives ∇‖g‖², or Jᵀu, for the whole batch.

    If it is not ``measured``, only norms, sums, losses and products with other passes are
    available. The pass then keeps no graph of its backward half, layers below the first trainable
    one keep nothing, and attention may use torch's fused kernels, which have no second derivative.

    Args:
        gradients: The examples with model and loss.
        mechanism: Its clip function and C; the gradient is clipped as a whole.
        forward: An earlier forward pass over the same examples at the same weights; None: run one.
        measured: Whether something will be differentiated twice.

    Attributes:
        recording: What the pass left.
        scale: ωφ(n), [batch].
        scale_derivative: ωφ′(n), [batch], if measured.
    """

    def __init__(
        self,
        gradients: ExampleGradients,
        mechanism: Mechanism,
        forward: RecordedForward | None = None,
        *,
        measured: bool = True,
    ) -> None:
        z, clip, max_grad_norm = (
            gradients.examples.z.detach(),
            mechanism.clip,
            mechanism.max_grad_norm,
        )
        super().__init__(
            gradients if measured else replace(gradients, twice=False), clip, max_grad_norm
        )
        if forward is None:
            forward = forward_pass(self.gradients, z.requires_grad_() if measured else z)
        self.recording = backward_pass(self.gradients, forward, differentiable=measured)
        self.losses, self.output_gradients = (
            self.recording.losses.detach(),
            self.recording.output_gradients,
        )
        with self.gradients.backward_state():
            if measured:
                self._cut = cut(self.recording)
                self._square = self._cut.squared_norm()
                self.norm = self._square.total.sqrt()
            else:
                self.norm = squared_norm(self.recording).sqrt()
        self.scale = self.weighted(clip.scale(self.norm, max_grad_norm))
        self.clipped_norm = self.norm * self.scale
        if measured:
            self.scale_derivative = self.weighted(clip.scale_derivative(self.norm, max_grad_norm))
        self._norm_gradient: Tensor | None = None

    def norm_gradient(self) -> Tensor:
        """∇n = ∇(n²)/(2n), 0 if g = 0, [batch, d]; computed once."""
        if self._norm_gradient is None:
            cotangents: Cotangents = {}
            with self.gradients.backward_state(probes=True):
                self._square.add_derivative(cotangents)
                slope = self._cut.pulled_back(cotangents)
            self._norm_gradient = 0.5 * safe_reciprocal(self.norm)[:, None] * slope
        return self._norm_gradient

    def clipped_norm_gradient(self) -> Tensor:
        """a = ∂‖g̃‖/∂z = (φ + nφ′) ∇n, [batch, d]."""
        return (self.scale + self.norm * self.scale_derivative)[:, None] * self.norm_gradient()

    def perpendicular_rmatvec(self, u: Tensor) -> Tensor:
        """φJᵀPu = φ(Jᵀu − (ĝ·u)∇n), [batch, d], for u of shape [p]."""
        slope = self.norm_gradient()
        with self.gradients.backward_state(probes=True):
            products, cotangents = self._cut.inner_products(self.gradients.unflatten(u))
            across = self._cut.pulled_back(cotangents)
        along = products * safe_reciprocal(self.norm)
        return self.scale[:, None] * (across - along[:, None] * slope)

    def perpendicular_rows(self, probes: Iterable[Tensor], at_once: int = 1) -> Iterator[Tensor]:
        """As in :class:`Jacobian`; ``at_once`` probes share the same, larger operations."""
        if at_once == 1:
            yield from map(self.perpendicular_rmatvec, probes)
            return
        given, facts = torch.stack(list(probes)), self.gradients.facts
        self.norm_gradient()  # the same for all probes, so computed outside the map
        for part in given.tensor_split(-(-len(given) // at_once)):
            rows: Iterable[Tensor] = ()
            if not facts.probes_apart:
                try:
                    rows = vmap(self.perpendicular_rmatvec)(part)
                except (RuntimeError, UnsupportedCallError) as error:
                    logger.info("probes are processed one by one: %s", error)
                    facts.probes_apart = True
            yield from map(self.perpendicular_rmatvec, part) if facts.probes_apart else rows

    def folded_row(self, mechanism: Mechanism, u: Tensor) -> Tensor:
        r"""r = J̃ᵀM^{1/2}(Pu + ĝ)/s, [batch, d], for u of shape [p].

        E[r rᵀ] = I. It needs one derivative.

        With w = M^{1/2}(Pu + ĝ) = sqrt(κ⊥)u + βĝ, β = sqrt(κ∥) − sqrt(κ⊥)(ĝ·u), r is ∇_z⟨h, g⟩ for
        the fixed vector h = φw + φ′(g·w)ĝ = φ sqrt(κ⊥) u + (φβ + φ′n sqrt(κ∥)) ĝ, where ∇_z⟨g, g⟩/2
        = ∇(n²)/2.
        """
        perpendicular, parallel = mechanism.weights(self.clipped_norm)
        root, reciprocal = perpendicular.sqrt(), safe_reciprocal(self.norm)
        with self.gradients.backward_state(probes=True):
            products, cotangents = self._cut.inner_products(self.gradients.unflatten(u))
            beta = parallel.sqrt() - root * products * reciprocal
            extra = self.scale * beta + self.scale_derivative * self.norm * parallel.sqrt()

            # φ sqrt(κ⊥) is a common factor, so only one of the two parts has to be scaled for each
            # example.
            before = self.scale * root
            self._square.add_derivative(
                cotangents, 0.5 * extra * reciprocal * safe_reciprocal(before)
            )
            return before[:, None] * self._cut.pulled_back(cotangents)

    def clipped_sum(self, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Σ_i φ_i g_i by parameter name, over the examples that ``mask`` (1 or 0, [batch]) keeps; 0
        if unused.
        """
        weight, dtype = self.scale if mask is None else self.scale * mask, self.gradients.dtype
        with self.gradients.backward_state():
            sums = weighted_sum(self.recording, weight.to(dtype))
        return {
            name: sums[name] if name in sums else torch.zeros_like(value, dtype=dtype)
            for name, value in self.gradients.parameters.items()
        }

    def inner_products(self, direction: Mapping[str, Tensor]) -> Tensor:
        """⟨g̃, u⟩, [batch], for u by parameter name; no gradient is formed."""
        shaped = {
            name: direction[name].view_as(value)
            for name, value in self.gradients.parameters.items()
        }
        with self.gradients.backward_state():
            return self.scale * CutRecording(self.recording, {}).inner_products(shaped)[0]

    def products_with(self, others: ExampleGradients) -> Tensor:
        """As in :class:`Jacobian`, from one more forward and backward pass, which is not kept."""
        recording = record(others, others.examples.z.detach(), differentiable=False)
        with self.gradients.backward_state():
            return gradient_products(self.recording, recording)
