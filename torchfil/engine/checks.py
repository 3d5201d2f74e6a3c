"""What every step is checked for: a list, each entry with a flag and an explanation.

A flag stays on the device until all of a step's are read (:mod:`torchfil.engine.flags`); the
explanation looks closer, and is asked for only if the check has failed. Leaving checks out changes
no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchfil.engine import losses
from torchfil.engine.evidence import Evidence
from torchfil.engine.forward import ForwardPass
from torchfil.engine.losses import (
    WEIGHTED_BY_TOKENS,
    IdentifiedLoss,
    LossMismatchError,
    TokenMean,
)
from torchfil.engine.replica import Replica
from torchfil.fisher.gradients import ExampleGradients, flatten
from torchfil.fisher.masks import replayed_masks
from torchfil.fisher.models import autocast_as, call_with
from torchfil.fisher.recording import losses_of
from torchfil.private import check_finite
from torchfil.utils.trees import tensors_of

_FAR_APART = 5  # times the tolerance: more than lower precision can explain
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
_LOOSE_TOLERANCE = 0.1  # half precision

NOT_TAKEN = "This step was not taken."
_NOT_FINITE = (
    "the gradient of an example in this batch is NaN or infinite, though its inputs are finite: "
    "is there a function whose derivative is not finite there, such as sqrt at 0? {}"
)
DIVERGED = (
    "the model's outputs on this batch are NaN or infinite: training has diverged. Go back to "
    "earlier weights with a smaller learning rate, or look for an overflow in the model. {}"
)
_NOTHING_LEARNED = (
    "ALL GRADIENTS OF A STEP ARE EXACTLY ZERO: the model learns nothing from this batch, whose "
    "examples have Fisher information 0 and infinite error bounds. Check the loss (cross-entropy "
    "of a single output is always 0), whether all labels are ignored (-100), and whether a part "
    "before the output is frozen or detached."
)
WEIGHTED_BY_OPACUS = (
    "some examples have more targets that count (not -100) than others, and Opacus's hooks "
    "formed gradients of a mean over all targets of the batch, which depend on other examples. "
    "Use grad_sample_mode='auto', or a loss with reduction='sum' and loss_reduction='sum'. "
    f"{NOT_TAKEN}"
)
_MIXED = (
    "the model's own loss mixes the examples of a batch: its gradient is no weighted sum of "
    "those of its examples. Contrastive losses, such as CLIP's and SigLIP's, compare each "
    "example with the others, so no part belongs to one. Train with a loss of one example: let "
    f"the model return what it is made from, and pass criterion= to make_private. {NOT_TAKEN}"
)
COPY_DIFFERS = (
    f"the engine's copy of the model gives {{}}: a forward hook, or a module attribute that is "
    "not a plain number, flag or text, changes the output. Move it into a module's forward(). "
    f"{NOT_TAKEN}"
)
_EARLIER_BATCH = (
    "the step got a batch that was read before the last one, and would be recorded for the last "
    "one's examples. Read a batch, take its step, then read the next, without a prefetcher. "
    f"{NOT_TAKEN}"
)


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: For messages to developers.
        flag: Whether it has failed, bool [] on the device; None: there is nothing to compare.
        explain: What is wrong: an error, or a warning to show once; None if a closer look finds
            nothing. It may raise.
        is_late: Whether a GPU, which is still computing, answers at the next step.
    """

    name: str
    flag: Callable[[Any], Tensor | None]
    explain: Callable[[Any], Exception | None]
    is_late: bool = False


# ------------------------------------------------------------------ a batch before its passes


@dataclass(frozen=True)
class Given:
    """A call of the model.

    Attributes:
        call: The call.
        targets: Of its rows.
        replica: The model.
        earlier: The batches that were read before the last one, if the call may be of them.
    """

    call: ForwardPass
    targets: object
    replica: Replica
    earlier: Sequence[object] = ()


def _not_finite(given: Given) -> Tensor | None:
    """Are inputs and targets finite?"""
    trees = given.call.args, given.call.kwargs, given.targets
    floating = [leaf for leaf in tensors_of(trees) if leaf.is_floating_point()]
    device = given.replica.device
    failed = [~leaf.sum(dtype=torch.float64).isfinite().to(device) for leaf in floating]
    if not failed:
        return None
    return torch.stack(failed).any() if len(failed) > 1 else failed[0]


def _where_not_finite(given: Given) -> None:
    """Infinite masks are fine."""
    check_finite(given.call.args, given.call.kwargs, given.targets)


def _is_earlier(given: Given) -> Tensor | None:
    """Did a step get an earlier batch than the last one read?

    Inputs decide, or targets if the inputs match no batch (they were augmented). A match with the
    last batch is right, a match with an earlier batch is wrong, and anything else passes. The first
    and last rows are compared.
    """
    if not given.earlier:
        return None
    call, replica = given.call, given.replica
    now, own = with_rows(replica.examples_first(call.batch)), with_rows((call.args, call.kwargs))
    if any(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in product(own, now)):
        return None
    targets = with_rows(call.targets)
    kinds = {(leaf.shape, leaf.dtype) for leaf in (*own, *targets)}
    before = [
        leaf
        for batch in given.earlier
        for leaf in with_rows(replica.examples_first(batch))
        if (leaf.shape, leaf.dtype) in kinds
    ]
    if not before:
        return None
    input_is_last, input_is_earlier, target_is_last, target_is_earlier = (
        _any_alike(part, leaves, replica.device)
        for part in (own, targets)
        for leaves in (now, before)
    )
    return ~input_is_last & (input_is_earlier | (target_is_earlier & ~target_is_last))


def with_rows(tree: object) -> list[Tensor]:
    """The tensors that have rows."""
    return [leaf for leaf in tensors_of(tree) if leaf.ndim and len(leaf)]


def _any_alike(some: list[Tensor], others: list[Tensor], device: torch.device) -> Tensor:
    """Whether any two have the same shape, dtype and numbers, in their first and last rows
    (vectors: everywhere).

    A constant tensor, such as labels of a single class, does not count.
    """
    pairs = [
        (a, b.to(device)) if a.ndim == 1 else (a[[0, -1]], b[[0, -1]].to(device))
        for a in some
        for b in others
        if a.shape == b.shape and a.dtype == b.dtype
    ]
    alike = [(a == b).all() & (a != a.flatten()[0]).any() for a, b in pairs]
    return torch.stack(alike).any() if alike else torch.zeros((), dtype=torch.bool, device=device)


@dataclass(frozen=True)
class Weighting:
    """A loss with a batch's targets, where no loop's gradients show how it weights examples."""

    loss: IdentifiedLoss
    targets: object


def _weights_differ(given: Weighting) -> Tensor | None:
    """Does a mean over a batch's tokens make weights depend on others?"""
    function = given.loss.function
    if not (isinstance(function, TokenMean) and function.mean):
        return None
    weights = given.loss.weightings(given.targets)[-1]
    return (weights != weights[:1]).any() if isinstance(weights, Tensor) else None


# ------------------------------------------------------------------ a pass


@dataclass
class Uneven:
    """How often the model's own loss was not the mean over its examples."""

    times: int = 0


@dataclass(frozen=True)
class Found:
    """A pass over some examples, with what is known of them besides.

    Attributes:
        call: The call that they are from.
        gradients: The examples with the engine's copy of the model.
        losses: ℓ of the pass, [batch].
        output_gradients: ∂ℓ_i/∂output_i of the pass; None: it has none.
        seen: What the live model did; None: it was not asked.
        reduced: Whether the model computes with fewer digits than float32 has.
        loss_reduction: "mean" or "sum".
        look: Raises if the loop has another loss.
        by_opacus: Whether Opacus's gradients are released.
        uneven: See there.
    """

    call: ForwardPass
    gradients: ExampleGradients
    losses: Tensor
    output_gradients: Sequence[Tensor] | None
    seen: Evidence | None
    reduced: bool
    loss_reduction: str
    look: Callable[[], None]
    by_opacus: bool = False
    uneven: Uneven = field(default_factory=Uneven)

    @property
    def own_loss(self) -> IdentifiedLoss | None:
        """The loss, if the model computes it: one number for a batch."""
        loss = None if self.seen is None else self.seen.loss
        return loss if isinstance(loss, IdentifiedLoss) and loss.is_models_own else None

    @cached_property
    def apart_at_outputs(self) -> Tensor:
        """How far the gradients at the outputs are apart, by weighting."""
        assert self.seen is not None
        observed = self.seen.output_gradients
        ours = self.output_gradients or ()
        return losses.relative_differences(ours, observed, self.seen.weightings)

    @property
    def tolerance_at_outputs(self) -> float:
        """Of these."""
        assert self.seen is not None
        floating = (leaf for leaf in self.seen.output_gradients if leaf.is_floating_point())
        return tolerance(next(floating), reduced=self.reduced)

    @cached_property
    def live_losses(self) -> tuple[Tensor, Tensor]:
        """The losses of the pass and those at the live model's outputs."""
        seen, own = self.seen, self.own_loss
        assert seen is not None
        with torch.no_grad(), autocast_as(seen.autocast, self.gradients.device):
            if own is None:
                return self.losses, losses_of(seen.loss, seen.outputs, seen.targets)
            mean = self.loss_reduction == "mean"
            return self.losses.mean() if mean else self.losses.sum(), own(seen.outputs, None)


def _other_outputs(found: Found) -> Tensor | None:
    """Do the gradients at the outputs, ours and the loop's, agree?"""
    if found.seen is None or not found.seen.output_gradients or found.output_gradients is None:
        return None
    return ~(found.apart_at_outputs[0] <= found.tolerance_at_outputs)


def _why_other_outputs(found: Found) -> Exception | None:
    apart, near = float(found.apart_at_outputs.min()), found.tolerance_at_outputs
    if apart <= near:  # with the weights of a mean over tokens
        if found.by_opacus:
            return LossMismatchError(WEIGHTED_BY_OPACUS)
        return UserWarning(WEIGHTED_BY_TOKENS)
    found.look()
    if apart <= _FAR_APART * near:  # lower precision
        return None
    if not math.isfinite(apart):
        return RuntimeError(_NOT_FINITE.format(NOT_TAKEN))
    theirs = f"a gradient at the outputs that differs by {apart:.3g}, relative to the largest"
    return RuntimeError(COPY_DIFFERS.format(theirs))


def _other_losses(found: Found) -> Tensor | None:
    """Does each example alone have the loss that it has at the outputs for the whole batch?

    Equal gradients at the outputs show it, too. The model's own loss is one number for a batch: it
    is compared with the mean over the examples. If it differs, this is a warning, and now and then
    (the first time, the second, the fourth, …) an error if it weights no examples, but mixes them.
    """
    seen = found.seen
    if seen is None or (seen.output_gradients and found.output_gradients is not None):
        return None
    ours, theirs = found.live_losses
    return is_far(distance(ours, theirs), tolerance(theirs, reduced=found.reduced))


def _why_other_losses(found: Found) -> Exception | None:
    assert found.seen is not None
    ours, theirs = found.live_losses
    apart, size = distance(ours, theirs).tolist()
    if not math.isfinite(apart + size):
        finite = all(bool(leaf.isfinite().all()) for leaf in tensors_of(found.seen.outputs))
        return RuntimeError((_NOT_FINITE if finite else DIVERGED).format(NOT_TAKEN))
    if found.own_loss is None:
        return RuntimeError(
            "an example alone has another loss than in its batch (they differ by up to "
            f"{apart:.3g}, the largest being {size:.3g}). Either the model mixes examples, or "
            f"{COPY_DIFFERS.format('other outputs')}"
        )

    # the model's own loss: does it weight its examples, or mix them?
    found.uneven.times += 1
    times = found.uneven.times
    if times & (times - 1) == 0:
        mixed = _share_mixed(found.call, found.own_loss, found.gradients)
        if mixed > tolerance(theirs, reduced=found.reduced):
            return LossMismatchError(_MIXED)
    if times > 1:  # other numbers of the same
        return None
    return UserWarning(
        f"the model's own loss on this batch differs by {apart:.3g} from the mean over its "
        "examples alone: the model weights examples by others of the batch. Training and "
        "accounting use its loss on each example alone, with equal weights."
    )


def _share_mixed(call: ForwardPass, loss: IdentifiedLoss, gradients: ExampleGradients) -> float:
    """The share of ∇L, for the model's own loss L on this batch, that no weighting of its examples
    explains.

    This is min_w ‖∇L − Σ_i w_i g_i‖ / ‖∇L‖, by least squares. Gradients are compared as sums of 64
    · batch groups of numbers with random signs.
    """
    weights = {name: value.clone().requires_grad_() for name, value in gradients.parameters.items()}
    with torch.enable_grad(), replayed_masks(call.masks), gradients.backward_state():
        with gradients.forward_state():
            own = {**weights, **gradients.own_constants()}
            value = loss(call_with(gradients.model, own, call.args, call.kwargs), None)
        found = torch.autograd.grad(
            value, list(weights.values()), allow_unused=True, materialize_grads=True
        )
        of_batch = flatten(dict(zip(weights, found, strict=True)))
    count, size = len(gradients), gradients.num_parameters
    source = torch.Generator(gradients.device).manual_seed(0)
    signs = torch.randint(2, (size,), generator=source, device=gradients.device) * 2 - 1

    def short(gradient: Tensor) -> Tensor:
        return (
            F.pad(gradient * signs, (0, -size % (64 * count)))
            .view(-1, 64 * count)
            .sum(dim=0)
            .double()
            .cpu()
        )

    rows = [replace(gradients, examples=gradients.examples[slice(i, i + 1)]) for i in range(count)]
    alone = torch.stack([short(row.gradients()[0]) for row in rows], dim=1)  # [64 · batch, batch]
    whole = short(of_batch)[:, None]
    rest = whole - alone @ torch.linalg.lstsq(alone, whole, driver="gelsd").solution
    return float(rest.norm() / whole.norm().clamp(min=1e-300))


@dataclass(frozen=True)
class Norms:
    """What a pass's numbers add up to, at once: later passes overwrite them.

    Attributes:
        total: Σ‖g‖.
        finite: Whether Σℓ is finite.
    """

    total: Tensor
    finite: Tensor

    @classmethod
    def of(cls, norm: Tensor, losses: Tensor) -> Norms:
        """Of ‖g‖ and ℓ, [batch] each."""
        return cls(norm.sum(), losses.sum().isfinite())


def _tell_nothing(norms: Norms) -> Tensor:
    """Is ‖g‖ finite and not all 0?"""
    return ~norms.total.isfinite() | (norms.total == 0)


def _why_they_tell_nothing(norms: Norms) -> Exception:
    """If ‖g‖ is not finite, the losses show whether the training has diverged."""
    if bool(norms.total == 0):
        return UserWarning(_NOTHING_LEARNED)
    late = "It is the batch of the last step, which was taken: go back to earlier weights."
    text = _NOT_FINITE if bool(norms.finite) else DIVERGED
    return RuntimeError(text.format(late if norms.total.is_cuda else NOT_TAKEN))


@dataclass(frozen=True)
class Released:
    """‖g‖ as measured and of the gradients that Opacus has formed, [batch] each."""

    measured: Tensor
    released: Tensor
    reduced: bool


def _other_norms(found: Released) -> Tensor:
    """Are they the same, and not all 0?"""
    apart = distance(found.measured, found.released)
    near = tolerance(found.released, reduced=found.reduced)
    return is_far(apart, near) | (apart[1] == 0)


def _why_other_norms(found: Released) -> Exception:
    apart, largest = distance(found.measured, found.released).tolist()
    if not math.isfinite(apart + largest):
        return RuntimeError(_NOT_FINITE.format(NOT_TAKEN))
    if apart <= tolerance(found.released, reduced=found.reduced) * largest:
        return UserWarning(_NOTHING_LEARNED)
    return RuntimeError(
        "the per-example gradients that Opacus has formed differ from those of the engine's loss "
        f"(norms by up to {apart:.3g}, the largest being {largest:.3g}): part of the loss does not "
        "go through the model's output, the model mixes examples, or Opacus's rule for a layer is "
        "wrong here (convolutions with channels last in memory). grad_sample_mode='auto' needs "
        f"none of its rules. {NOT_TAKEN}"
    )


# ------------------------------------------------------------------ how far is too far


def check_copy(ours: Tensor, loops: Tensor, *, reduced: bool) -> None:
    """Raise unless ‖g‖ from the engine's copy of the model and from the loop's own pass agree,
    [batch] each.

    ``reduced`` says whether the model computes with fewer digits than float32 has.
    """
    apart, size = distance(ours, loops).tolist()
    if apart > tolerance(loops, reduced=reduced) * size:
        theirs = COPY_DIFFERS.format(f"some that differ by up to {apart:.3g}")
        raise RuntimeError(f"the gradients' norms are at most {size:.3g}, {theirs}")


def tolerance(values: Tensor, *, reduced: bool) -> float:
    """How much such values may differ, relative to their size."""
    return _LOOSE_TOLERANCE if reduced else _TOLERANCE.get(values.dtype, _LOOSE_TOLERANCE)


def distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """max |a − b| and max |b|, float64 [2]."""
    return torch.stack([(ours.to(theirs) - theirs).abs().max(), theirs.abs().max()]).double()


def is_far(distance: Tensor, tolerance: float) -> Tensor:
    """Whether a distance is above the tolerance, relative to the size, or not finite, bool []."""
    return ~((distance[0] <= tolerance * distance[1]) & distance.isfinite().all())


# ------------------------------------------------------------------ the list


@dataclass(frozen=True)
class Checks:
    """By what they look at.

    Attributes:
        batch: :class:`Given`, of which each step looks before the passes.
        weighting: :class:`Weighting`.
        examples: :class:`Found`, of each pass.
        norms: :class:`Norms`, of each pass whose sum is released.
        released: :class:`Released`, with Opacus's hooks.
    """

    batch: Sequence[Check] = (
        Check("an earlier batch", _is_earlier, lambda _: RuntimeError(_EARLIER_BATCH)),
        Check("finite inputs", _not_finite, _where_not_finite),
    )
    weighting: Sequence[Check] = (
        Check("equal weights", _weights_differ, lambda _: UserWarning(WEIGHTED_BY_TOKENS)),
    )
    examples: Sequence[Check] = (
        Check("gradients at the outputs", _other_outputs, _why_other_outputs),
        Check("losses", _other_losses, _why_other_losses),
    )
    norms: Sequence[Check] = (Check("norms", _tell_nothing, _why_they_tell_nothing, is_late=True),)
    released: Sequence[Check] = (Check("Opacus's norms", _other_norms, _why_other_norms),)


NO_CHECKS = Checks((), (), (), (), ())
