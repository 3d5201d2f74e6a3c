"""What is the loss? The gradient at the model's outputs shows it.

Accounting needs the loss ℓ as a function of one example. Wherever the gradient of a batch's loss at
the outputs comes from (the loop's ``backward()``, the model's own ``.loss``, a criterion on a whole
batch), it must be

    δ_i = c w_i ∂ℓ(o_i, y_i)/∂o_i        c = 1/B for a mean over the batch, 1 for a sum

with weights w_i that are 1, or those of a mean over the batch's tokens (:class:`TokenMean`). This
one comparison identifies cross-entropy, binary cross-entropy with logits, squared error and losses
of the outputs alone; any other loss has to be given as ``criterion=``. At every step it catches
class weights, label smoothing, scaling and anything else that the engine does not know about.

A model that computes its loss itself (``model(**batch).loss``, as Hugging Face's do) returns one
number for a batch. A gradient γ at that number counts as γ ∂loss/∂output at the outputs that the
loss was made from. The labels, which are inputs of the model, become targets (:class:`LossInside`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.fisher.models import wide
from torchfil.fisher.recording import losses_of
from torchfil.utils.trees import map_tensors, tensors_of

LossFunction = Callable[[Any, Any], Tensor]
NO_TARGETS = object()  # a call without labels: the targets are the batch's
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOOSE_TOLERANCE = 3e-2  # half precision

WEIGHTED_BY_TOKENS = (
    "the loss is a mean over all targets of a batch that count (not -100), which weights an "
    "example by others. Training and accounting use each example's mean over its own targets, "
    "with equal weights; if long ones should weigh more, use sums: reduction='sum', "
    "loss_reduction='sum'."
)
_NOT_IDENTIFIED = (
    "the loss in the training loop is not one of those that are identified by themselves "
    "(CrossEntropyLoss, BCEWithLogitsLoss, MSELoss; mean or sum, with the targets as the batch "
    "gives them). {hint}Pass the loss that the loop uses, a torch loss or a function: "
    "make_private(…, criterion={line}). If its targets are not the batch's last item or its key "
    "'labels', say how a batch becomes (inputs, targets): batch_to_inputs=lambda batch: {split}. "
    "A target that the loop draws at random has to be drawn in the model's forward(). This step "
    "was not taken."
)


class LossMismatchError(ValueError):
    """The gradient at the model's output is not that of the loss that the engine accounts for."""


# ---------------------------------------------------------------------- the loss of one example


@dataclass(frozen=True)
class TokenMean:
    """Cross-entropy of an example, its mean over the targets that count: Σ_t CE(o_t, y_t) / max(1,
    n).

    A mean over all targets of a batch that count, Σ_i Σ_t ℓ_it / Σ_j n_j, weights example i by n_i
    / Σ_j n_j. The weight depends on how many targets *others* have, so no part of that loss belongs
    to one example. Here ℓ_i is the mean over the example's own targets, as in a batch of one, and
    every example has the same weight. An example without any target that counts has loss 0 (torch
    gives NaN).

    Attributes:
        criterion: ``nn.CrossEntropyLoss`` or ``nn.NLLLoss`` with reduction "sum" and without class
            weights.
        mean: Whether the sum is divided by n.
        classes_last: Whether the outputs are [batch, …, classes], as in language models, rather
            than torch's [batch, classes, …].
        shifted: Whether output t is compared with target t + 1, as in causal language models.

    Example:
        >>> loss = TokenMean(nn.CrossEntropyLoss(reduction="sum"), classes_last=True, shifted=True)
        >>> bool(
        ...     loss(torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]])) == torch.tensor(2.0).log()
        ... )
        True
    """

    criterion: nn.CrossEntropyLoss | nn.NLLLoss
    mean: bool = True
    classes_last: bool = False
    shifted: bool = False

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """ℓ of a batch of one."""
        if self.shifted:
            # in float32, as language models do
            outputs, targets = wide(outputs[:, :-1]), targets[:, 1:]
        # token by token: softmax over a dimension that is not the last is slow on GPUs
        if self.classes_last:
            outputs, targets = outputs.flatten(0, -2), targets.flatten()
        total: Tensor = self.criterion(outputs, targets)
        if not self.mean:
            return total
        if targets.is_floating_point():  # class probabilities all count
            return total * targets.shape[1] / targets.numel()
        return total / (targets != self.criterion.ignore_index).sum().clamp(min=1)


@dataclass(frozen=True)
class IdentifiedLoss:
    """A loss ℓ(outputs, targets) of one example (a batch of one).

    Attributes:
        name: For messages.
        function: Computes it.
        place: The place of its output among several tensors; None: it takes the outputs as they
            are.
        is_models_own: Whether the model computes it, and it cannot be computed from the other
            outputs.
        summed: Whether the loop adds it up over the batch, whatever ``loss_reduction`` says, as
            ``out.sum()`` does.
    """

    name: str
    function: LossFunction
    place: int | None = None
    is_models_own: bool = False
    summed: bool = False

    @classmethod
    def of(cls, criterion: LossFunction) -> IdentifiedLoss:
        """A criterion that the user gave."""
        name = (
            repr(criterion)
            if isinstance(criterion, nn.Module)
            else getattr(criterion, "__name__", repr(criterion))
        )
        if (
            isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss)
            and criterion.reduction == "mean"
        ):
            summed = copy.copy(criterion)
            summed.reduction = "sum"
            return cls(name, TokenMean(summed))
        return cls(name, criterion)

    def __call__(self, outputs: object, targets: object) -> Tensor:
        """The loss."""
        return self.function(
            outputs if self.place is None else tensors_of(outputs)[self.place], targets
        )

    def weightings(self, targets: object) -> list[Tensor | float]:
        """The weights w, [batch] or one number each, that the loop's loss may give the examples of
        a batch; first 1.0.

        Besides equal weights these are B n_i / Σ_j n_j, those of a mean over the batch's targets
        that count. For a criterion of the user's, targets that are shifted by one (causal language
        models) may be meant as well.
        """
        if self.summed:
            assert isinstance(targets, Tensor)
            return [float(len(targets))]
        if (
            not isinstance(targets, Tensor)
            or targets.is_floating_point()
            or not targets.ndim
            or self.is_models_own
        ):
            return [1.0]
        ignored = getattr(getattr(self.function, "criterion", None), "ignore_index", -100)
        weights: list[Tensor | float] = [1.0]
        for shifted in (
            [self.function.shifted] if isinstance(self.function, TokenMean) else [False, True]
        ):
            if targets.ndim > shifted:
                part = targets[:, 1:] if shifted else targets
                n = (part != ignored).reshape(len(part), -1).sum(dim=1)
                weights.append(n * len(n) / n.sum().clamp(min=1))
        return weights


# ----------------------------------------------------------------- compare gradients at the outputs


def output_gradients(loss: IdentifiedLoss, outputs: object, targets: object) -> list[Tensor]:
    """∂ℓ(o_i, y_i)/∂o_i of every example, for each tensor of the outputs; 0 for integers and single
    numbers.

    For the model's own loss, which is one of its outputs, the gradient is 1 there.

    Raises:
        LossMismatchError: The loss does not take one example of these outputs and targets.
    """
    if loss.is_models_own:
        return [
            torch.full_like(leaf, k == loss.place) for k, leaf in enumerate(tensors_of(outputs))
        ]
    outputs = map_tensors(_differentiable, outputs)
    moving = [leaf for leaf in tensors_of(outputs) if leaf.requires_grad]
    try:
        with torch.enable_grad():
            total = losses_of(loss, outputs, targets).sum()  # the gradient of ℓ_i at o_j is 0
        found = iter(torch.autograd.grad(total, moving, allow_unused=True, materialize_grads=True))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        raise LossMismatchError(
            f"the criterion ({loss.name}) fails on one example, as criterion(outputs, targets): "
            f"{error}. Outputs are the model's, here a {type(outputs).__name__}; targets are the "
            "batch's last item, or see batch_to_inputs=."
        ) from error
    return [
        next(found) if leaf.requires_grad else torch.zeros_like(leaf)
        for leaf in tensors_of(outputs)
    ]


def placed(
    loss: IdentifiedLoss, outputs: object, targets: object, observed: Sequence[Tensor]
) -> IdentifiedLoss:
    """The same loss of the only output that a gradient reached, if it does not take all outputs
    together.

    This is for loops such as ``criterion(outputs[1], y)``.
    """
    reached = [k for k, gradient in enumerate(observed) if bool(gradient.any())]
    if not isinstance(outputs, Tensor) and len(reached) == 1 and loss.place is None:
        try:
            output_gradients(loss, outputs, targets)
        except LossMismatchError:
            return replace(loss, place=reached[0])
    return loss


def _differentiable(leaf: Tensor) -> Tensor:
    return leaf.detach().requires_grad_(leaf.is_floating_point() and leaf.ndim > 0)


def relative_differences(
    alone: object, observed: object, weightings: Sequence[Tensor | float]
) -> Tensor:
    """``max |w_i a_i − b_i| / max |b|`` over all outputs, for each weighting w, [weightings].

    It stays on the device.

    Args:
        alone: a_i, the gradients of the loss of each example alone, [batch, …] for each tensor of
            the outputs.
        observed: b_i, those of the batch's loss, unscaled by the batch size.
        weightings: w, [batch], [batch, K] or one number each.
    """
    largest = []  # for each output: max |w_i a_i − b_i| for each weighting, then max |b|
    for a, b in zip(tensors_of(alone), tensors_of(observed), strict=True):
        if b.numel() and (b.is_floating_point() or b.is_complex()):
            apart = [b]
            for weights in weightings:
                if isinstance(weights, Tensor):
                    weights = weights.to(a)
                    weights = weights.reshape(*weights.shape, *[1] * (a.ndim - weights.ndim))
                apart.append(a * weights - b)
            largest.append(torch.stack([each.abs().max() for each in apart]).double())
    size, *distances = torch.stack([each.to(largest[0].device) for each in largest]).amax(dim=0)
    return torch.stack(distances) / size.clamp(min=1e-300)


def _agreements(
    loss: IdentifiedLoss, alone: object, observed: object, targets: object
) -> list[bool]:
    """Whether the gradients agree, for each of the loss's weightings.

    Rounding may cause a small difference.
    """
    dtypes = [leaf.dtype for leaf in tensors_of(alone) if leaf.is_floating_point()]
    tolerance = max(_TOLERANCE.get(dtype, _LOOSE_TOLERANCE) for dtype in dtypes)
    return [
        each < tolerance
        for each in relative_differences(alone, observed, loss.weightings(targets)).tolist()
    ]


def identify_loss(
    outputs: object, targets: object, observed: object, reduction: str = "mean"
) -> IdentifiedLoss:
    """The loss whose gradient at the output is the observed one.

    Of several outputs, the one that a gradient reached.

    Args:
        outputs: The model's outputs, [batch, …], detached.
        targets: The batch's targets.
        observed: δ_i of each example, unscaled by the batch size.
        reduction: Which reduction to try first; with one number per example both are the same.

    Raises:
        LossMismatchError: None fits; the message has the line to write.
    """
    gradients, hint = tensors_of(observed), ""
    reached = [k for k, gradient in enumerate(gradients) if bool(gradient.any())] or [0]
    if len(reached) == 1 and isinstance(targets, Tensor):
        output, at_output = tensors_of(outputs)[reached[0]], gradients[reached[0]]
        candidates = _candidates(output, targets, reduction)
        for loss in itertools.chain(candidates, _losses_of_outputs(reduction)):
            with contextlib.suppress(LossMismatchError):
                alone = output_gradients(loss, output, targets)
                if any(_agreements(loss, alone, at_output, targets)):
                    return replace(loss, place=None if isinstance(outputs, Tensor) else reached[0])
                factor = _common_factor(alone, at_output)
                if factor is not None and not hint:
                    hint = f"It looks like {loss.name}. {_scaled(factor)}"
    raise LossMismatchError(_not_identified(outputs, targets, len(reached), hint))


def likely_loss(outputs: object, targets: object) -> IdentifiedLoss:
    """The first loss that takes such outputs and targets, if no loop shows which it is.

    Raises:
        LossMismatchError: None does, or there are several outputs or targets.
    """
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
        for loss in _candidates(outputs, targets, "mean"):
            return loss
    raise LossMismatchError(_not_identified(outputs, targets, 1, ""))


def check_loss(loss: IdentifiedLoss, outputs: object, targets: object, observed: object) -> bool:
    """Raise :class:`LossMismatchError` unless the observed gradient at the output is that of the
    loss.

    Returns:
        Whether the loop's loss is a mean over the batch's tokens that gives the examples uneven
        weights.
    """
    alone = output_gradients(loss, outputs, targets)
    agrees = _agreements(loss, alone, observed, targets)
    if any(agrees):
        return not agrees[0]
    factor = _common_factor(alone, observed)
    raise LossMismatchError(
        "the gradient at the model's output differs from that of the engine's loss "
        f"({loss.name}): another loss, or one that mixes examples. "
        f"{'' if factor is None else _scaled(factor)}Pass the loop's loss as criterion=. This "
        "step was not taken."
    )


def check_equal_weights(loss: IdentifiedLoss, outputs: object, targets: object) -> bool:
    """Compare the gradient of a criterion's value on a batch with those of its values on single
    examples.

    The values themselves hardly show how a criterion weights examples: at the start of training all
    losses are nearly equal, and so is their mean, whatever the weights; the gradients differ
    immediately.

    Returns:
        Whether it is a mean over the batch's tokens that gives the examples uneven weights.

    Raises:
        LossMismatchError: It is neither the mean nor the sum over examples, nor such a mean.
    """
    outputs = map_tensors(_differentiable, outputs)
    leaves = [leaf for leaf in tensors_of(outputs) if leaf.requires_grad]
    try:
        with torch.enable_grad():
            whole = loss(outputs, targets)
    except Exception:  # it takes only single examples
        return False
    # a sum in half precision
    if whole.numel() != 1 or not whole.requires_grad or bool(whole.isinf()):
        return False
    at_batch = torch.autograd.grad(
        whole.reshape(()), leaves, allow_unused=True, materialize_grads=True
    )
    alone = [
        part
        for part in output_gradients(loss, outputs, targets)
        if part.ndim and part.is_floating_point()
    ]
    for factor in (len(leaves[0]), 1):  # a mean or a sum over the batch
        agrees = _agreements(loss, alone, [factor * gradient for gradient in at_batch], targets)
        if any(agrees):
            return not agrees[0]
    raise LossMismatchError(
        f"the criterion ({loss.name}) mixes examples, as class weights with reduction='mean' do: "
        "no example has its own loss. Use reduction='sum'. This step was not taken."
    )


def _candidates(outputs: Tensor, targets: Tensor, reduction: str) -> Iterator[IdentifiedLoss]:
    """The losses that are identified by themselves, if they take such outputs and targets."""
    probabilities = targets.is_floating_point() and targets.shape == outputs.shape
    for each in (reduction, "sum" if reduction == "mean" else "mean"):
        name = f"CrossEntropyLoss(reduction={each!r})"
        entropy = partial(TokenMean, nn.CrossEntropyLoss(reduction="sum"), each == "mean")
        if probabilities or _are_classes(targets, outputs):
            yield IdentifiedLoss(name, entropy())
        if outputs.ndim > 2 and _are_classes(targets, outputs.movedim(-1, 1)):
            yield IdentifiedLoss(f"{name} of every token", entropy(classes_last=True))
            yield IdentifiedLoss(
                f"{name} of the next token", entropy(classes_last=True, shifted=True)
            )
        for kind in (
            (nn.BCEWithLogitsLoss, nn.MSELoss) if targets.numel() == outputs.numel() else ()
        ):
            yield IdentifiedLoss(
                f"{kind.__name__}(reduction={each!r})", partial(_reshaped, kind(reduction=each))
            )


def _are_classes(targets: Tensor, outputs: Tensor) -> bool:
    """Whether these are class numbers, or -100, for outputs [batch, classes, …].

    A GPU would not survive others.
    """
    if (
        targets.is_floating_point()
        or outputs.ndim < 2
        or targets.shape != outputs.shape[:1] + outputs.shape[2:]
    ):
        return False
    return bool(((targets == -100) | ((targets >= 0) & (targets < outputs.shape[1]))).all())


def _reshaped(loss: Callable[..., Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss with targets in the outputs' shape: the loop's ``y.unsqueeze(1).float()``."""
    targets = targets if targets.is_floating_point() else targets.to(outputs.dtype)
    return loss(outputs, targets.reshape(outputs.shape))


def _losses_of_outputs(reduction: str) -> Iterator[IdentifiedLoss]:
    """± the sum or the mean of an example's outputs, whatever its targets.

    Loops write them as ``out.sum()`` and ``-out.mean()``, Opacus's own tests among them.
    """
    kinds = (Tensor.sum, Tensor.mean)
    for summed, sign, kind in itertools.product((False, True), (1, -1), kinds):
        name = f"{'minus ' * (sign < 0)}the {kind.__name__} of an example's outputs"
        if not summed or reduction == "mean":
            name += ", added up over the batch" * summed
            yield IdentifiedLoss(name, partial(_signed, sign, kind), summed=summed)


def _signed(sign: int, kind: Callable[[Tensor], Tensor], outputs: Tensor, _: object) -> Tensor:
    return sign * kind(outputs)


def _common_factor(expected: object, observed: object) -> float | None:
    """c if observed = c · expected, else None."""
    want, seen = (
        torch.cat([leaf.reshape(-1).double() for leaf in tensors_of(part)])
        for part in (expected, observed)
    )
    factor = float((want * seen).sum() / want.square().sum().clamp(min=1e-300))
    return (
        factor if factor != 0 and bool((seen - factor * want).norm() < 1e-3 * seen.norm()) else None
    )


def _scaled(factor: float) -> str:
    """What a factor between the loop's gradient and that of the loss means."""
    reduction = "sum" if factor > 1 else "mean"
    return (
        f"It is {factor:.6g} times that: the loop scales its loss (a GradScaler, a division for "
        f"accumulation: leave them out), or it takes the {reduction} over the batch: pass "
        f"loss_reduction={reduction!r} to make_private. "
    )


def _not_identified(outputs: object, targets: object, reached: int, hint: str) -> str:
    """The error of a loss that is not identified, with the line to write."""
    line, split = "nn.NLLLoss()", "(batch[0], batch[0]) (an autoencoder)"
    if reached > 1:
        names, keys = (
            list(part) if isinstance(part, dict) else [0, 1] for part in (outputs, targets)
        )
        terms = (
            f"F.cross_entropy(outputs[{a!r}], targets[{b!r}])"
            for a, b in zip(names, keys, strict=False)
        )
        line, split = (
            f"lambda outputs, targets: {' + '.join(terms)}",
            "(batch[0], (batch[1], batch[2]))",
        )
        hint = f"It has a gradient at {reached} outputs of the model. "
    return _NOT_IDENTIFIED.format(hint=hint, line=line, split=split)


# ------------------------------------------------------------------ the criterion of ghost clipping


class GhostCriterion:
    """The criterion that ``grad_sample_mode="ghost"`` returns: the mean (or sum) over a batch of
    ℓ_i, as Opacus's.

    ℓ_i comes from the criterion with ``reduction="none"``: the mean (or sum) over the other
    dimensions of example i. So class weights do not mix examples, and a mean over tokens is over
    those of a sequence that ``ignore_index`` keeps. Opacus returns an object whose ``backward()``
    goes through the model twice. Here the loop's backward pass ends at the model's outputs, so an
    ordinary tensor is enough: ``loss.backward()``, ``loss / 2`` are torch's.

    Args:
        criterion: A torch loss, or a function(outputs, targets) that gives one number or one per
            example; None: cross-entropy.
        loss_reduction: "mean" or "sum", over the batch.

    Raises:
        ValueError: The criterion's own reduction differs.

    Example:
        >>> loss = GhostCriterion(nn.MSELoss(), "mean")(torch.ones(2, 3), torch.zeros(2, 3))
        >>> loss.item()
        1.0
    """

    def __init__(self, criterion: Callable[..., Tensor] | None, loss_reduction: str) -> None:
        given = nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion
        own = getattr(given, "reduction", loss_reduction)
        if own != loss_reduction:
            raise ValueError(
                f"the criterion's reduction is {own!r} and loss_reduction={loss_reduction!r}; "
                "ghost clipping needs the same for both: change one of them"
            )
        self.criterion, self.reduction = given, loss_reduction
        self._by_example = given
        if isinstance(given, nn.Module) and hasattr(given, "reduction"):
            self._by_example = copy.copy(given)
            self._by_example.__dict__["reduction"] = "none"
        self._flattens = False  # whether the loop concatenates the tokens of all sequences

    def __call__(self, *args: Any, shape: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
        """The batch's loss.

        Args:
            *args: Outputs and targets.
            shape: As in Opacus, the shape [batch, length, …] of outputs before their first two
                dimensions were flattened, for losses by token.
            **kwargs: Passed to the criterion.
        """
        if shape is not None:
            self._flattens = True
        elif self._flattens and len(args) == 2 and args[0].ndim > 2:
            # the engine's, with outputs as the model has them
            shape = args[0].shape
            args = tuple(part.flatten(0, 1) for part in args)
        losses = self._by_example(*args, **kwargs)
        # over each sequence's targets that count
        if shape is not None and losses.ndim and self.reduction == "mean":
            targets, ignored = (
                kwargs.get("target", args[-1]),
                getattr(self.criterion, "ignore_index", None),
            )
            counts = torch.ones_like(losses) if ignored is None else (targets != ignored).to(losses)
            losses, counts = (part.reshape(shape[0], -1).sum(dim=1) for part in (losses, counts))
            losses = losses / counts.clamp(min=1)
        return losses.mean() if self.reduction == "mean" else losses.sum()

    def __repr__(self) -> str:
        return repr(self.criterion)
