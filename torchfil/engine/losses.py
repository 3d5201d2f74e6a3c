"""Which loss does the training loop use? The gradient that arrives at the model's output shows it.

Accounting needs the loss as a function of one example. The gradient δ_i that backward() leaves at example i's
output, times the batch size if the loop averages, must equal ∂ℓ(o_i, y_i)/∂o_i for the engine's loss ℓ. This
identifies a standard loss. Checked at every step, it catches class weights, label smoothing, scaling and anything
else that the engine does not know about. If there are several outputs (a dict, or those of a Hugging Face model), the
loss uses the one at which a gradient arrives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from torchfil.engine.token_means import TokenMean
from torchfil.utils.trees import flattened, map_tensors, tensors_of

__all__ = [
    "IdentifiedLoss",
    "LossMismatchError",
    "ModelLoss",
    "check_loss",
    "identify_loss",
    "likely_loss",
    "means_over_tokens",
    "output_gradients",
    "relative_difference",
    "scale_of_loss",
    "tolerance_of",
    "weighted",
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

    @classmethod
    def of(cls, criterion: LossFunction) -> IdentifiedLoss:
        """A criterion that the user gave."""
        name = repr(criterion) if isinstance(criterion, nn.Module) else getattr(criterion, "__name__", repr(criterion))
        if isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) and criterion.reduction == "mean":
            return cls(name, TokenMean(criterion))
        return cls(name, criterion)

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The loss."""
        return self.function(outputs, targets)

    @property
    def is_models_own(self) -> bool:
        """Whether the model computes it itself, and it could not be identified from the other outputs."""
        return isinstance(self.function, ModelLoss)

    def weights(self, targets: Any) -> Tensor | None:
        """How a batch's mean weights the examples, [batch], if that depends on others' targets; None: equally."""
        weights: Callable[[Any], Tensor | None] | None = getattr(self.function, "weights", None)
        return None if weights is None else weights(targets)


@dataclass(frozen=True)
class ModelLoss:
    """The loss that a model returns among its outputs: the scalar tensor of that number."""

    number: int = 0

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The loss of a batch of one, which includes its labels."""
        return [leaf for leaf in tensors_of(outputs) if leaf.ndim == 0][self.number]


@dataclass(frozen=True)
class _OfOneOutput:
    """A loss of one of several outputs: of the tensor of that number."""

    number: int
    function: LossFunction

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return self.function(tensors_of(outputs)[self.number], targets)

    def weights(self, targets: Any) -> Tensor | None:
        return self.function.weights(targets) if isinstance(self.function, TokenMean | _OfOutputs) else None


@dataclass(frozen=True)
class _Parts:
    """A factor times the sum of cross-entropies of the outputs of those numbers, each with one of the targets."""

    numbers: tuple[int, ...]
    factor: float

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        tensors = tensors_of(outputs)
        parts = [F.cross_entropy(tensors[k], y) for k, y in zip(self.numbers, tensors_of(targets), strict=True)]
        return self.factor * torch.stack(parts).sum()


@dataclass(frozen=True)
class _OfOutputs:
    """± the sum or the mean of an example's outputs, whatever its targets; ``summed``: the loop adds up the batch."""

    sign: int
    mean: bool
    summed: bool

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return self.sign * (outputs.mean() if self.mean else outputs.sum())

    def weights(self, targets: Any) -> Tensor | None:
        return torch.full(targets.shape[:1], float(len(targets)), device=targets.device) if self.summed else None


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
    """∂ℓ(o_i, y_i)/∂o_i of every example, in the outputs' shape; 0 for integers, None for anything but tensors."""
    leaves, form = flattened(outputs)
    tensors = {k: leaf for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    moving = {k: leaf for k, leaf in tensors.items() if leaf.is_floating_point() and leaf.ndim}
    still = {k: leaf for k, leaf in tensors.items() if k not in moving and leaf.ndim}
    target_leaves, target_form = flattened(targets)
    compared = {k: leaf for k, leaf in enumerate(target_leaves) if isinstance(leaf, Tensor)}

    def filled(everything: list[Any], rows: dict[int, Tensor], structure: Any) -> Any:
        merged = [rows[k].unsqueeze(0) if k in rows else leaf for k, leaf in enumerate(everything)]
        return pytree.tree_unflatten(merged, structure)

    def one(moved: dict[int, Tensor], others: dict[int, Tensor], target: dict[int, Tensor]) -> Tensor:
        output = filled(leaves, {**others, **moved}, form)
        return loss(output, filled(target_leaves, target, target_form)).reshape(())

    try:
        by_place = vmap(grad(one))(moving, still, compared)
    except RuntimeError:  # a loss that vmap does not support, such as one with one_hot
        batch = (moving, still, compared)
        rows = [grad(one)(*map_tensors(lambda leaf: leaf[i], batch)) for i in range(len(next(iter(moving.values()))))]  # noqa: B023
        by_place = {k: torch.stack([row[k] for row in rows]) for k in moving}
    zeros = {k: torch.zeros_like(leaf) for k, leaf in tensors.items()}
    return pytree.tree_unflatten([{**zeros, **by_place}.get(k) for k in range(len(leaves))], form)


def identify_loss(outputs: Any, targets: Any, observed: Any, reduction: str = "mean") -> IdentifiedLoss:
    """The standard torch loss whose gradient at the output is the observed one.

    Args:
        outputs: The model's outputs, [batch, …], detached.
        targets: The batch's targets.
        observed: δ_i of each example, unscaled by the batch size.
        reduction: Which reduction to try first; with one number per example both are the same.

    Raises:
        LossMismatchError: None fits; the message says what was tried, what it looks like and what to pass.
    """
    gradients = tensors_of(observed)
    reached = [k for k, gradient in enumerate(gradients) if bool((gradient != 0).any())] or [0]
    if len(reached) > 1:
        return _identify_parts(reached, outputs, targets, observed)
    if not isinstance(targets, Tensor):
        raise LossMismatchError(
            f"the loss can be identified only if the batch has one tensor of targets; got {type(targets).__name__}. "
            "Pass criterion=a function(outputs, targets) of one example, and batch_to_inputs=a function that maps a "
            "batch to (inputs, targets) if the targets are not the batch's last item, or its key 'labels'."
        )

    number = reached[0]
    output, at_output = tensors_of(outputs)[number], gradients[number]
    standard = sorted(_candidates(output, targets), key=lambda loss: reduction not in loss.name)
    for candidate in [*standard, *_of_outputs(reduction)]:
        difference = _difference(candidate, output, targets, at_output)
        if difference is not None and difference < tolerance_of(output):
            if isinstance(outputs, Tensor):
                return candidate
            return IdentifiedLoss(candidate.name, _OfOneOutput(number, candidate.function))
    raise LossMismatchError(
        "the loss in the training loop is not one of the standard losses "
        f"({', '.join(_STANDARD)}; mean or sum, targets as the batch gives them). " + _guess(output, targets, at_output)
    )


def likely_loss(outputs: Any, targets: Any) -> IdentifiedLoss:
    """The first standard loss that takes such outputs and targets, if no loop shows which it is.

    Raises:
        LossMismatchError: None does, or there are several outputs or targets.
    """
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
        for candidate in _candidates(outputs, targets):
            if _difference(candidate, outputs, targets, torch.zeros_like(outputs)) is not None:
                return candidate
    raise LossMismatchError(
        f"no standard loss takes these outputs ({type(outputs).__name__}) and targets ({type(targets).__name__}): pass "
        "criterion=<function(outputs, targets)>, and batch_to_inputs= if the targets are not the batch's last item or "
        "its labels"
    )


def _identify_parts(reached: list[int], outputs: Any, targets: Any, observed: Any) -> IdentifiedLoss:
    """The mean or the sum of cross-entropies, each of one output with one of the targets, in order."""
    parts = tensors_of(targets)
    if len(parts) == len(reached) and all(
        _are_class_numbers(target, tensors_of(outputs)[k]) for k, target in zip(reached, parts, strict=True)
    ):
        for name, factor in (("mean", 1 / len(parts)), ("sum", 1.0)):
            loss = IdentifiedLoss(f"{name} of {len(parts)} CrossEntropyLosses", _Parts(tuple(reached), factor))
            if relative_difference(output_gradients(loss, outputs, targets), observed) < tolerance_of(
                tensors_of(outputs)[reached[0]]
            ):
                return loss
    raise LossMismatchError(_several_outputs(outputs, targets, len(reached)))


def _several_outputs(outputs: Any, targets: Any, reached: int) -> str:
    """What to do if a loss has several parts."""
    names = list(outputs) if isinstance(outputs, dict) else range(len(tensors_of(outputs)))
    first, second = [f"outputs[{name!r}]" for name in names][:2]
    y = [f"targets[{name!r}]" for name in targets][:2] if isinstance(targets, dict) else ["targets[0]", "targets[1]"]
    split = (
        f" and, to make targets a tuple (they are one {type(targets).__name__} now), batch_to_inputs=lambda batch: "
        "(batch[0], (batch[1], batch[2]))"
    )
    return (
        f"the loop's loss has a gradient at {reached} outputs of the model, and only a loss of one of them can be "
        f"identified. Pass the whole loss of one example: criterion=lambda outputs, targets: loss_1({first}, {y[0]}) + "
        f"0.5 * loss_2({second}, {y[-1]}){'' if len(tensors_of(targets)) > 1 else split}."
    )


def check_loss(loss: IdentifiedLoss, outputs: Any, targets: Any, observed: Any) -> TokenMean | None:
    """Raise :class:`LossMismatchError` unless the observed gradient at the output is that of the loss.

    Returns:
        The mean over a batch's tokens that weights the examples as the loop does, if the weights differ and the loss
        itself does not include them; else None.
    """
    if loss.is_models_own:
        _check_own_loss(outputs, observed)
        return None
    try:
        alone = output_gradients(loss, outputs, targets)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        raise LossMismatchError(
            f"the criterion ({loss.name}) fails on one example of this batch: {error}. It is called as "
            "criterion(outputs, targets) with batches of one; targets are the batch's last item unless "
            "batch_to_inputs= says otherwise."
        ) from error
    tolerance = max(tolerance_of(leaf) for leaf in tensors_of(outputs) if leaf.is_floating_point())
    weights = loss.weights(targets)
    expected = weighted(alone, weights)
    difference = relative_difference(expected, observed)
    if difference < tolerance:
        return None
    for mean, by_tokens in means_over_tokens(targets) if weights is None else ():
        if relative_difference(weighted(alone, by_tokens), observed) < tolerance:
            return mean

    # Say what it looks like, if that is known.
    factor = _common_factor(expected, observed)
    if factor is not None:
        hint = (
            f"It is {factor:.6g} times that: the loop scales its loss (a GradScaler, a division for accumulation; "
            "leave both out, the optimizer divides itself), or loss_reduction does not match the loop (a mean over "
            "the batch for 'mean', a sum for 'sum')."
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
    """c if the observed gradient at the output is c times that of the loss; None if it is not a multiple."""
    try:
        return _common_factor(output_gradients(loss, outputs, targets), observed)
    except (RuntimeError, ValueError, TypeError, IndexError):  # reported by the check of the loss
        return None


def _check_own_loss(outputs: Any, observed: Any) -> None:
    """Raise unless the gradient 1 arrived at the model's own loss, and nothing elsewhere."""
    for leaf, gradient in zip(tensors_of(outputs), tensors_of(observed), strict=True):
        if leaf.ndim and bool((gradient != 0).any()):
            raise LossMismatchError(
                "the loop adds something to the model's own loss (a gradient arrives at another output as well). Pass "
                "the whole loss of one example as criterion=<function(outputs, targets)>. This step was not taken."
            )
        if not leaf.ndim and abs(float(gradient) - 1) > tolerance_of(leaf) and float(gradient) != 0:
            raise LossMismatchError(
                f"the loop's loss is {float(gradient):.6g} times the model's own: call backward() on outputs.loss "
                "unchanged, or pass loss_reduction='sum' if the model sums over the batch. This step was not taken."
            )


def weighted(gradients: Any, weights: Tensor | None) -> Any:
    """Gradients of every example, [batch, …] each, times its weight."""
    if weights is None:
        return gradients
    return map_tensors(lambda leaf: leaf * weights.to(leaf).reshape(-1, *[1] * (leaf.ndim - 1)), gradients)


def means_over_tokens(targets: Any) -> Iterator[tuple[TokenMean, Tensor]]:
    """Means over a batch's tokens, plain and shifted by one, and how they weight its examples, [batch]."""
    if isinstance(targets, Tensor) and not targets.is_floating_point() and targets.ndim > 1:
        for shifted in (False, True):
            mean = TokenMean(nn.CrossEntropyLoss(), shifted=shifted)
            weights = mean.weights(targets)
            if weights is not None:
                yield mean, weights


def _candidates(outputs: Tensor, targets: Tensor) -> Iterator[IdentifiedLoss]:
    same_shape = targets.shape == outputs.shape and targets.is_floating_point()
    for name, kind in _STANDARD.items():
        for reduction in ("mean", "sum"):
            loss, label = kind(reduction=reduction), f"{name}(reduction={reduction!r})"
            if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
                if _are_class_numbers(targets, outputs):
                    yield IdentifiedLoss(label, TokenMean(loss))
                elif isinstance(loss, nn.CrossEntropyLoss) and same_shape:
                    yield IdentifiedLoss(label, loss)
                if outputs.ndim > 2 and _are_class_numbers(targets, outputs.movedim(-1, 1)):
                    yield IdentifiedLoss(f"{label} of every token", TokenMean(loss, classes_last=True))
                    yield IdentifiedLoss(f"{label} of the next token", TokenMean(loss, classes_last=True, shifted=True))
            elif name == "BCELoss" and not (_are_probabilities(outputs) and _are_probabilities(targets)):
                continue
            elif same_shape:
                yield IdentifiedLoss(label, loss)
            elif targets.numel() == outputs.numel():
                yield IdentifiedLoss(f"{label} of targets in the outputs' shape", _reshaping(loss))


def _of_outputs(reduction: str) -> Iterator[IdentifiedLoss]:
    """Losses whose gradient is the same at every output, as that of ``outputs.sum()``."""
    for summed, sign, mean in itertools.product((False, True), (1, -1), (False, True)):
        name = f"{'minus ' if sign < 0 else ''}the {'mean' if mean else 'sum'} of an example's outputs"
        if reduction == "mean" or not summed:
            yield IdentifiedLoss(name + ", added up over the batch" * summed, _OfOutputs(sign, mean, summed))


def _are_class_numbers(targets: Tensor, outputs: Tensor) -> bool:
    if targets.is_floating_point() or outputs.ndim < 2 or targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        return False
    return targets.numel() == 0 or (int(targets.max()) < outputs.shape[1] and int(targets.min()) >= -100)


def _are_probabilities(values: Tensor) -> bool:
    """On a GPU a value outside [0, 1] would not raise but end the process's CUDA context."""
    return bool(((values >= 0) & (values <= 1)).all())


def _reshaping(loss: nn.Module) -> LossFunction:
    return lambda outputs, targets: loss(outputs, targets.reshape(outputs.shape).to(outputs.dtype))


def _difference(loss: IdentifiedLoss, outputs: Tensor, targets: Tensor, observed: Tensor) -> float | None:
    try:
        expected = weighted(output_gradients(loss, outputs, targets), loss.weights(targets))
        return relative_difference(expected, observed)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None  # this candidate does not take such outputs and targets


def relative_difference(expected: Any, observed: Any) -> float:
    """The largest difference of ``expected`` and ``observed`` over the largest ``observed``, over all tensors."""
    pairs = list(zip(tensors_of(expected), tensors_of(observed), strict=True))
    largest = max((float(seen.abs().max()) for _, seen in pairs if seen.numel()), default=0.0)
    distance = max((float((want - seen).abs().max()) for want, seen in pairs if seen.numel()), default=0.0)
    if distance == 0:
        return 0.0
    return distance / largest if largest > 0 else float("inf")


def tolerance_of(outputs: Tensor) -> float:
    """The relative difference that rounding may cause between gradients at such outputs."""
    return _TOLERANCE.get(outputs.dtype, _LOOSE_TOLERANCE)


def _common_factor(expected: Any, observed: Any) -> float | None:
    """c if observed = c · expected, else None."""
    want = torch.cat([leaf.reshape(-1).double() for leaf in tensors_of(expected)])
    seen = torch.cat([leaf.reshape(-1).double() for leaf in tensors_of(observed)])
    square = want.square().sum()
    if square == 0:
        return None
    factor = (want * seen).sum() / square
    close = (seen - factor * want).norm() < 1e-3 * seen.norm()
    return float(factor) if bool(close) and factor != 0 else None


def _guess(outputs: Tensor, targets: Tensor, observed: Tensor) -> str:
    """What the observed gradient looks like, where that can be told, and what to pass."""
    remedy = "Pass the loss you use to make_private: criterion=<function(outputs, targets)>, an ordinary torch loss."
    classes = outputs.shape[1] if outputs.ndim > 1 else 0
    if outputs.ndim == 2 and targets.shape == outputs.shape[:1] and not targets.is_floating_point() and classes > 1:
        one_hot = F.one_hot(targets.clamp(0, classes - 1), classes).to(outputs.dtype)
        direction = one_hot - 1 / classes  # δ = softmax − one-hot + ε (one-hot − 1/K)
        rest = observed - (outputs.softmax(dim=1) - one_hot)
        smoothing = float((rest * direction).sum() / direction.square().sum())
        if 1e-3 < smoothing < 1 and (rest - smoothing * direction).norm() < 1e-2 * observed.norm():
            return f"It looks like nn.CrossEntropyLoss(label_smoothing={smoothing:.3g}). {remedy}"
    for candidate in _candidates(outputs, targets):
        try:
            factor = _common_factor(output_gradients(candidate, outputs, targets), observed)
        except (RuntimeError, ValueError, TypeError, IndexError):
            continue
        if factor is not None and abs(factor - 1) > 1e-3:
            looks = f"It looks like {factor:.6g} times {candidate.name}"
            reduction = _other_reduction(factor, len(observed))
            if reduction is not None:
                return f"{looks}, a {reduction} over the batch: pass loss_reduction={reduction!r} to make_private."
            return f"{looks}. {remedy}"
    return remedy


def _other_reduction(factor: float, batch_size: int) -> str | None:
    """The reduction of the loop, where the factor is that between a sum and a mean over the batch."""
    for reduction, expected in (("sum", float(batch_size)), ("mean", 1 / batch_size)):
        if abs(factor / expected - 1) < 1e-3:
            return reduction
    return None
