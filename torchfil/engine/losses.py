"""Which loss does the training loop use? Told by the gradient that arrives at the model's output.

Accounting needs the loss as a function of one example. The gradient δ_i that backward() leaves at example i's
output, times the batch size where the loop averages, must equal ∂ℓ(o_i, y_i)/∂o_i for the engine's loss ℓ. That
identifies a standard loss, and checked at every step it catches class weights, label smoothing, scaling and
anything else that happens behind the engine's back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from torchfil.utils.deferred import read_later
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = [
    "IdentifiedLoss",
    "LossMismatchError",
    "check_equal_weights",
    "check_ignored_targets_later",
    "check_loss",
    "identify_loss",
    "output_gradients",
    "scale_of_loss",
]

LossFunction = Callable[[Any, Any], Tensor]
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOOSE_TOLERANCE = 3e-2  # half precision


class LossMismatchError(ValueError):
    """The gradient at the model's output is not that of the loss that the engine accounts for."""


@dataclass(frozen=True)
class IdentifiedLoss:
    """A loss of one example (a batch of one), with a name for messages."""

    name: str
    function: LossFunction

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The loss."""
        return self.function(outputs, targets)


_STANDARD: dict[str, type[nn.Module]] = {
    "CrossEntropyLoss": nn.CrossEntropyLoss,
    "NLLLoss": nn.NLLLoss,
    "BCEWithLogitsLoss": nn.BCEWithLogitsLoss,
    "BCELoss": nn.BCELoss,
    "MSELoss": nn.MSELoss,
    "HuberLoss": nn.HuberLoss,
    "L1Loss": nn.L1Loss,
    "PoissonNLLLoss": nn.PoissonNLLLoss,
    "KLDivLoss": nn.KLDivLoss,
}


def output_gradients(loss: LossFunction, outputs: Any, targets: Any) -> Any:
    """∂ℓ(o_i, y_i)/∂o_i of every example, in the shape of the outputs; 0 for integers, None where no tensor stands."""
    leaves, form = pytree.tree_flatten(outputs)
    tensors = {k: leaf for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    moving = {k: leaf for k, leaf in tensors.items() if leaf.is_floating_point()}

    def one(moved: dict[int, Tensor], every: dict[int, Tensor], target: Any) -> Tensor:
        merged = [{**every, **moved}.get(k, leaf) for k, leaf in enumerate(leaves)]
        output = pytree.tree_unflatten(merged, form)
        single = map_tensors(lambda tensor: tensor.unsqueeze(0), (output, target))
        return loss(*single).reshape(())

    in_dims = (0, 0, pytree.tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, targets))
    found = vmap(grad(one), in_dims=in_dims)(moving, tensors, targets)
    zeros = {k: torch.zeros_like(leaf) for k, leaf in tensors.items()}
    return pytree.tree_unflatten([{**zeros, **found}.get(k) for k in range(len(leaves))], form)


def identify_loss(outputs: Any, targets: Any, observed: Any, reduction: str = "mean") -> IdentifiedLoss:
    """The standard torch loss whose gradient at the output is the observed one.

    Args:
        outputs: The model's outputs, [batch, …], detached.
        targets: The batch's targets.
        observed: δ_i of each example, unscaled by the batch size.
        reduction: Which reduction to try first; on one number per example both are the same.

    Raises:
        LossMismatchError: None fits; the text says what was tried, what it looks like and what to pass.
    """
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        raise LossMismatchError(
            "the loss can be identified only where model and batch give one tensor each for outputs and targets; got "
            f"{type(outputs).__name__} and {type(targets).__name__}. Pass criterion=a function(outputs, targets) of "
            "one example, and batch_to_inputs= if the targets are not the batch's last item."
        )
    for candidate in sorted(_candidates(outputs, targets), key=lambda loss: reduction not in loss.name):
        difference = _difference(candidate, outputs, targets, observed)
        if difference is not None and difference < _tolerance(outputs):
            return candidate
    raise LossMismatchError(
        "the loss in the training loop is none of the standard ones "
        f"({', '.join(_STANDARD)}; mean or sum, targets as the batch gives them). "
        + _guess(outputs, targets, observed)
        + " Pass the loss you use to make_private: criterion=<function(outputs, targets)>, an ordinary torch loss."
    )


def check_loss(loss: IdentifiedLoss, outputs: Any, targets: Any, observed: Any) -> None:
    """Raise :class:`LossMismatchError` unless the observed gradient at the output is that of the loss."""
    try:
        expected = output_gradients(loss, outputs, targets)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise LossMismatchError(
            f"the criterion ({loss.name}) fails on one example of this batch: {error}. It is called as "
            "criterion(outputs, targets) with batches of one; targets are the batch's last item unless "
            "batch_to_inputs= says otherwise."
        ) from error
    difference = _relative_difference(expected, observed)
    if difference < max(_tolerance(leaf) for leaf in tensors_of(outputs) if leaf.is_floating_point()):
        return

    # Say what it looks like, as far as that can be told.
    factor = _common_factor(expected, observed)
    if factor is not None:
        hint = (
            f"It is {factor:.6g} times that: the loop scales its loss (a GradScaler, a division for accumulation, "
            "which the optimizer does by itself: leave both out), or loss_reduction is not what the loop does (a "
            "mean over the batch for 'mean', a sum for 'sum')."
        )
    elif isinstance(outputs, Tensor) and isinstance(targets, Tensor):
        hint = _guess(outputs, targets, observed)
    else:
        hint = ""
    raise LossMismatchError(
        f"the gradient at the model's output differs from that of the engine's loss ({loss.name}) by "
        f"{difference:.2g} relative: the training loop uses another loss, or one that mixes examples (class weights "
        f"with reduction='mean' do). {hint} Pass the loss you use to make_private as criterion=, and make it "
        "sum or average over examples with equal weight. This step was not taken; nothing was recorded."
    )


def scale_of_loss(loss: IdentifiedLoss, outputs: Any, targets: Any, observed: Any) -> float | None:
    """c where the observed gradient at the output is c times that of the loss; None where it is no multiple."""
    try:
        return _common_factor(output_gradients(loss, outputs, targets), observed)
    except (RuntimeError, ValueError, TypeError, IndexError):  # told by the check of the loss
        return None


def check_equal_weights(loss: IdentifiedLoss, outputs: Any, targets: Any, losses: Tensor) -> None:
    """Raise :class:`LossMismatchError` where a batch's loss is neither the mean nor the sum of those, [batch]."""
    try:
        whole = loss(outputs, targets)
    except Exception:  # it takes single examples only
        return
    if whole.numel() != 1 or bool(whole.isinf()):  # a sum in half precision
        return
    losses = losses.double()
    tolerance = max(_tolerance(leaf) for leaf in (whole, *tensors_of(outputs)) if leaf.is_floating_point())
    value, size = float(whole), float(losses.abs().mean())
    mean, total = float(losses.mean()), float(losses.sum())
    if not any(abs(value - one) <= tolerance * max(size, abs(one)) for one in (mean, total)):
        raise LossMismatchError(
            f"the criterion ({loss.name}) gives {value:.6g} for this batch, but its values on single examples have the "
            f"mean {mean:.6g} and the sum {total:.6g}: it weights examples by others of "
            "the batch, as class weights and ignore_index with reduction='mean' do, and no example has a loss of its "
            "own. Use reduction='sum' (divided by the expected batch size, if you like). This step was not taken."
        )


def check_ignored_targets_later(loss: IdentifiedLoss, targets: Any) -> Callable[[], None]:
    """Begin to look whether a mean leaves out more targets of some examples than of others; what is returned raises.

    The batch's mean then weights examples by how many of their targets count.
    """
    criterion = loss.function
    if not isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) or criterion.reduction != "mean":
        return lambda: None
    if not isinstance(targets, Tensor) or targets.is_floating_point() or len(targets) < 2:
        return lambda: None
    ignored = (targets == criterion.ignore_index).reshape(len(targets), -1).sum(dim=1)
    uneven = read_later((ignored != ignored[0]).any())

    def confirm() -> None:
        if bool(uneven()):
            raise LossMismatchError(
                f"some targets of this batch are {criterion.ignore_index} (ignore_index), of some examples more than "
                "of others: a mean over what is left weights examples by others of the batch, and no example has a "
                "loss of its own. Use reduction='sum' (divided by the expected batch size, if you like). This step was "
                "not taken."
            )

    return confirm


def _candidates(outputs: Tensor, targets: Tensor) -> Iterator[IdentifiedLoss]:
    same_shape = targets.shape == outputs.shape and targets.is_floating_point()
    for name, kind in _STANDARD.items():
        for reduction in ("mean", "sum"):
            loss, label = kind(reduction=reduction), f"{name}(reduction={reduction!r})"
            if name in ("CrossEntropyLoss", "NLLLoss"):
                if _are_class_numbers(targets, outputs) or (name == "CrossEntropyLoss" and same_shape):
                    yield IdentifiedLoss(label, loss)
            elif name == "BCELoss" and not (_are_probabilities(outputs) and _are_probabilities(targets)):
                continue
            elif same_shape:
                yield IdentifiedLoss(label, loss)
            elif targets.numel() == outputs.numel():
                yield IdentifiedLoss(f"{label} of targets in the outputs' shape", _reshaping(loss))


def _are_class_numbers(targets: Tensor, outputs: Tensor) -> bool:
    if targets.is_floating_point() or outputs.ndim < 2 or targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        return False
    return targets.numel() == 0 or (int(targets.max()) < outputs.shape[1] and int(targets.min()) >= -100)


def _are_probabilities(values: Tensor) -> bool:
    """On a GPU a value outside [0, 1] would not raise but end the process's CUDA context."""
    return bool(((values >= 0) & (values <= 1)).all())


def _reshaping(loss: nn.Module) -> LossFunction:
    return lambda outputs, targets: loss(outputs, targets.reshape(outputs.shape).to(outputs.dtype))


def _difference(loss: LossFunction, outputs: Tensor, targets: Tensor, observed: Tensor) -> float | None:
    try:
        return _relative_difference(output_gradients(loss, outputs, targets), observed)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None  # this candidate does not take such outputs and targets


def _relative_difference(expected: Any, observed: Any) -> float:
    pairs = list(zip(tensors_of(expected), tensors_of(observed), strict=True))
    largest = max((float(seen.abs().max()) for _, seen in pairs if seen.numel()), default=0.0)
    distance = max((float((want - seen).abs().max()) for want, seen in pairs if seen.numel()), default=0.0)
    if distance == 0:
        return 0.0
    return distance / largest if largest > 0 else float("inf")


def _tolerance(outputs: Tensor) -> float:
    return _TOLERANCE.get(outputs.dtype, _LOOSE_TOLERANCE)


def _common_factor(expected: Any, observed: Any) -> float | None:
    """C where observed = c · expected, else None."""
    want = torch.cat([leaf.reshape(-1).double() for leaf in tensors_of(expected)])
    seen = torch.cat([leaf.reshape(-1).double() for leaf in tensors_of(observed)])
    square = want.square().sum()
    if square == 0:
        return None
    factor = (want * seen).sum() / square
    close = (seen - factor * want).norm() < 1e-3 * seen.norm()
    return float(factor) if bool(close) and factor != 0 else None


def _guess(outputs: Tensor, targets: Tensor, observed: Tensor) -> str:
    """A sentence on what the observed gradient looks like, or nothing."""
    classes = outputs.shape[1] if outputs.ndim > 1 else 0
    if outputs.ndim == 2 and targets.shape == outputs.shape[:1] and not targets.is_floating_point() and classes > 1:
        one_hot = F.one_hot(targets.clamp(0, classes - 1), classes).to(outputs.dtype)
        direction = one_hot - 1 / classes  # δ = softmax − one-hot + ε (one-hot − 1/K)
        rest = observed - (outputs.softmax(dim=1) - one_hot)
        smoothing = float((rest * direction).sum() / direction.square().sum())
        if 1e-3 < smoothing < 1 and (rest - smoothing * direction).norm() < 1e-2 * observed.norm():
            return f"It looks like nn.CrossEntropyLoss(label_smoothing={smoothing:.3g})."
    for candidate in _candidates(outputs, targets):
        try:
            factor = _common_factor(output_gradients(candidate, outputs, targets), observed)
        except (RuntimeError, ValueError, TypeError, IndexError):
            continue
        if factor is not None and abs(factor - 1) > 1e-3:
            return f"It looks like {factor:.6g} times {candidate.name}."
    return ""
