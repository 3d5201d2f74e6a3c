"""Models that compute their loss themselves: ``model(**batch).loss``, as Hugging Face's do.

Such a loss is one number for a batch, and one of the model's outputs. The engine needs the loss of one example as a
function of the model's other outputs. So a gradient that arrives at the loss is passed on to the outputs that the loss
was made from, δ = γ ∂loss/∂output, and the labels, which are inputs of the model, become targets: the engine's own
passes call the model without them. A loss with a term that does not go through the outputs is used as it is, on each
example alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.engine.loader import is_target_name, plain
from torchfil.engine.replica import Replica, buffers_kept
from torchfil.fisher.gradients import differentiable_twice
from torchfil.fisher.masks import replayed_masks
from torchfil.fisher.models import call_with, trainable_and_constant
from torchfil.private import decoder_tokens
from torchfil.utils.trees import flattened, form_of, tensors_of

__all__ = ["NO_TARGETS", "LossInside", "ModelCall"]

NO_TARGETS = object()  # a call without labels: the targets are the batch's
_SAME = 1e-4  # how much rounding may change the outputs without labels, relative to their size


@dataclass(frozen=True)
class ModelCall:
    """How the engine calls the model if the loop calls it with labels.

    Attributes:
        args: Positional inputs.
        kwargs: Keyword inputs, without labels if the model's outputs do not depend on them.
        targets: The labels; NO_TARGETS: the call has none, or they must stay because the outputs depend on them.
        pulled: ∂loss/∂output, by the place of the loss among the outputs and the place of the other output.
        labelled: Keyword inputs with the labels, as the loop gave them.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any = NO_TARGETS
    pulled: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    labelled: dict[str, Any] = field(default_factory=dict)


class LossInside:
    """Separates labels and loss in calls of a model that computes its loss itself; analyses each kind of call once.

    Args:
        replica: The model.

    Attributes:
        made_from: The places of the outputs that a loss is made from, by kind of call; cleared, it is analysed again.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._runs_without: dict[Hashable, bool] = {}
        self.made_from: dict[Hashable, list[int]] = {}

    def losses_in(self, outputs: Any) -> list[int]:
        """The places of losses among the outputs: single numbers with a graph, alone or with other outputs."""
        return [
            k
            for k, leaf in enumerate(flattened(outputs)[0])
            if isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.requires_grad
        ]

    def call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, masks: tuple[Tensor, ...] = ()
    ) -> ModelCall:
        """The call that gave these outputs (with their graph), with labels and loss separated."""
        args, kwargs = plain((args, kwargs))
        places = self.losses_in(outputs)
        if not places:
            return ModelCall(args, kwargs)
        pulled = {k: self._pulled(args, kwargs, outputs, k) for k in places}
        other, targets = self.without_labels(kwargs)
        told = all(pulled.values()) and targets is not NO_TARGETS
        if told and self._gives_the_same(args, kwargs, other, outputs, masks):
            return ModelCall(args, other, targets, pulled, kwargs)
        return ModelCall(args, kwargs)

    def without_labels(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Keyword inputs without labels, and the labels: a tensor or a dict of several; NO_TARGETS: there are none."""
        labels = {key: value for key, value in kwargs.items() if is_target_name(key) and isinstance(value, Tensor)}
        if not labels:
            return kwargs, NO_TARGETS
        rest = {key: value for key, value in kwargs.items() if key not in labels}

        # A decoder reads the labels, shifted one place to the right.
        if "labels" in labels and rest.get("decoder_input_ids") is None:
            tokens = decoder_tokens(self.replica.live, labels["labels"])
            rest |= {} if tokens is None else {"decoder_input_ids": tokens}
        return rest, next(iter(labels.values())) if len(labels) == 1 else labels

    def _pulled(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, place: int) -> dict[int, Tensor]:
        """∂loss/∂output by place, for the outputs that the loss at ``place`` was made from."""
        kind = (form_of(outputs), place)
        if kind not in self.made_from:
            copied, weights = self._outputs_of_copy(args, kwargs)
            parts = flattened(copied)[0]
            made_from = _made_from(parts, place)
            whole = _is_made_from(parts[place], [parts[k] for k in made_from], weights)
            self.made_from[kind] = made_from if whole else []
        leaves, places = flattened(outputs)[0], self.made_from[kind]
        return dict(zip(places, _gradients(leaves[place], [leaves[k] for k in places]), strict=True))

    def _outputs_of_copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
        """The copy's outputs, with a graph whose backward pass calls nobody's hooks, and its trainable weights."""
        self.replica.follow()
        trainable, constant = trainable_and_constant(self.replica.live)
        weights = {name: value.clone().requires_grad_() for name, value in trainable.items()}
        weights |= {name: value.clone() for name, value in constant.items()}
        with torch.enable_grad(), differentiable_twice(), self.replica.random_state_kept():
            outputs = call_with(self.replica.template, weights, args, kwargs)
        return outputs, [weights[name] for name in trainable]

    def _gives_the_same(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        without: dict[str, Any],
        outputs: Any,
        masks: tuple[Tensor, ...],
    ) -> bool:
        """Whether the other outputs are the same without labels; checked once for each kind of call."""
        kind = (form_of((args, kwargs)), form_of(outputs))
        if kind not in self._runs_without:
            live: nn.Module = self.replica.live
            try:
                with torch.no_grad(), differentiable_twice(), buffers_kept(live), replayed_masks(masks):
                    others = tensors_of(live(*args, **without))
                self._runs_without[kind] = _same(others, [leaf.detach() for leaf in tensors_of(outputs) if leaf.ndim])
            except torch.OutOfMemoryError:
                raise
            except Exception:  # it needs its labels
                self._runs_without[kind] = False
        return self._runs_without[kind]


def _made_from(leaves: list[Any], place: int) -> list[int]:
    """The places of the outputs that a loss was made from: one on which all depend, or all of them."""
    floating = [
        k
        for k, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.requires_grad and leaf.is_floating_point()
    ]
    gradients = dict(zip(floating, _gradients(leaves[place], [leaves[k] for k in floating]), strict=True))
    reached = [k for k in floating if bool((gradients[k] != 0).any())]
    for k in reached:
        others = [leaves[other] for other in reached if other != k]
        through = _gradients(leaves[k], others, gradients[k])
        totals = [gradients[other] for other in reached if other != k]
        if _same(list(through), totals, tolerance=1e-3):
            return [k]
    return reached


def _is_made_from(loss: Tensor, outputs: list[Tensor], weights: list[Tensor]) -> bool:
    """Whether the loss depends on the weights through these outputs alone: ∂loss/∂w = Σ ∂loss/∂output · ∂output/∂w.

    A penalty on the weights, or an auxiliary loss of something that is not returned, has another path to them.
    """
    whole = _gradients(loss, weights)
    through = torch.autograd.grad(
        outputs, weights, _gradients(loss, outputs), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    tolerance = _SAME if loss.dtype in (torch.float32, torch.float64) else 3e-2
    largest = max(float(part.abs().max()) for part in whole)
    pairs = zip(through, whole, strict=True)
    return all(float((a - b).abs().max()) <= tolerance * (float(b.abs().max()) + 1e-2 * largest) for a, b in pairs)


def _gradients(of: Tensor, outputs: list[Tensor], weights: Tensor | None = None) -> tuple[Tensor, ...]:
    """∂of/∂output for each output, or ∂⟨of, weights⟩/∂output; zeros if it does not depend on it."""
    if not outputs:
        return ()
    with torch.enable_grad():
        return torch.autograd.grad(of, outputs, weights, retain_graph=True, allow_unused=True, materialize_grads=True)


def _same(some: list[Tensor], others: list[Tensor], tolerance: float = _SAME) -> bool:
    """Whether they have the same number and shapes, and differ by at most the tolerance times the largest number."""
    if len(some) != len(others) or any(a.shape != b.shape for a, b in zip(some, others, strict=True)):
        return False
    pairs = [(a, b) for a, b in zip(some, others, strict=True) if b.numel()]
    return all(torch.allclose(a, b, tolerance, tolerance * float(b.abs().max()), equal_nan=True) for a, b in pairs)
