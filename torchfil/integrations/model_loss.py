"""The loss that a Hugging Face model computes itself, as a function of its outputs and labels.

A model's ``out.loss`` is a mean over all tokens of a batch, so a long text weighs more than a short one. Privacy needs
the loss of one example: ℓ_i is ``out.loss`` on a batch of example i alone, and a batch's loss is the mean of all ℓ_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchfil.utils.trees import map_tensors

__all__ = ["ModelLoss"]

Labels = Tensor | Mapping[str, Tensor]
_IGNORED = -100
_EXAMPLES_TO_LOOK_AT = 4
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}  # many models compute their loss in float32
_LOOSE_TOLERANCE = 3e-2  # half precision

# The loss that the name of a model's class implies; the first match counts.
_KINDS = {
    **{f"For{data}Classification": "sequence" for data in ("Sequence", "Image", "Video", "Audio")},
    **dict.fromkeys(("ForMultipleChoice", "ForNextSentencePrediction"), "choice"),
    **dict.fromkeys(("ForTokenClassification", "ForMaskedLM"), "tokens"),
    "ForQuestionAnswering": "span",
    **dict.fromkeys(("ForConditionalGeneration", "ForCausalLM", "LMHeadModel"), "next tokens"),
}
_REGRESSION, _SINGLE, _MULTI = "regression", "single_label_classification", "multi_label_classification"


@dataclass(frozen=True)
class ModelLoss:
    """loss(outputs, labels) = 1/B Σ_i ℓ_i, where ℓ_i is the model's own loss on example i alone.

    =============  ==============================================================================
    sequence       by ``config.problem_type``: (logits − labels)² (regression), cross entropy (single label),
                   binary cross entropy (multi label), each a mean over the example's own numbers
    choice         cross entropy over choices
    tokens         cross entropy, a mean over the example's tokens whose label is not −100
    next tokens    the same, where position t predicts label t + 1
    span           the mean of the cross entropies of start and end
    =============  ==============================================================================

    Guarantees:
        * :meth:`check` compares it with the model's own number, and raises an error if they differ.
        * If all labels of an example are −100, its loss is 0 (the model's own is 0/0).

    Attributes:
        kind: A row of the table.
        config: The model's configuration.
        label_smoothing: The smoothing of cross entropies, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> from types import SimpleNamespace
        >>> loss = ModelLoss("sequence", SimpleNamespace(problem_type=None, num_labels=1))
        >>> loss({"logits": torch.tensor([[1.0], [3.0]])}, torch.tensor([1.0, 1.0]))
        tensor(2.)
    """

    kind: str
    config: Any
    label_smoothing: float = 0.0

    @classmethod
    def of(cls, model: nn.Module, label_smoothing: float = 0.0) -> ModelLoss:
        """The loss of this model.

        Raises:
            ValueError: The model's class does not show which loss it has.
        """
        unwrap: Any = getattr(model, "get_base_model", None)  # peft's
        inner = unwrap() if unwrap is not None else model
        name, config = type(inner).__name__, getattr(inner, "config", None)
        classes = " ".join(part.__name__ for part in type(inner).__mro__)  # its class, then the base classes
        kind = next((kind for part, kind in _KINDS.items() if part in classes), None)
        if kind is None or config is None:
            unknown = f"the loss of {name} is unknown: its class is not one of {', '.join(_KINDS)}"
            raise ValueError(f"{unknown}. Pass FILTrainer(criterion=a function of (logits, labels)).")
        if kind == "next tokens" and getattr(config, "is_encoder_decoder", False):
            kind = "tokens"  # the decoder's inputs are already shifted
        return cls(kind, config, label_smoothing)

    @property
    def __name__(self) -> str:
        """The name in messages."""
        return f"the model's own loss, {self.kind}"

    def __call__(self, outputs: Mapping[str, Tensor], labels: Labels) -> Tensor:
        """The mean of ℓ over examples; several labels come as a dict by name."""
        return self.by_example(outputs, labels).mean()

    def by_example(self, outputs: Mapping[str, Tensor], labels: Labels) -> Tensor:
        """ℓ of every example, [batch]."""
        if not isinstance(labels, Tensor):
            start, end = (self._at(outputs[f"{part}_logits"], labels[f"{part}_positions"]) for part in ("start", "end"))
            return (start + end) / 2
        logits = _precise(outputs["logits"])
        if self.kind == "next tokens":
            return self._by_token(logits[:, :-1], labels[:, 1:])
        if self.kind == "tokens":
            return self._by_token(logits, labels)

        problem = self._problem(labels)
        if problem == _SINGLE:
            return self._by_token(logits, labels.reshape(len(logits)))
        if self.label_smoothing:
            given = f"label_smoothing_factor={self.label_smoothing}"
            raise ValueError(f"{given} smooths the choice among classes, and a {problem} has none; leave it out")
        numbers = labels.reshape(logits.shape).to(logits.dtype)
        if problem == _REGRESSION:
            return (logits - numbers).square().flatten(1).mean(dim=1)
        return F.binary_cross_entropy_with_logits(logits, numbers, reduction="none").flatten(1).mean(dim=1)

    def _problem(self, labels: Tensor) -> str:
        """The kind of prediction, chosen as the model chooses it."""
        if self.kind != "sequence":
            return _SINGLE
        if self.config.problem_type is not None:
            return str(self.config.problem_type)
        if self.config.num_labels == 1:
            return _REGRESSION
        return _SINGLE if labels.dtype in (torch.long, torch.int) else _MULTI

    def _by_token(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy, a mean over each example's labels that are not −100: logits [batch, …, classes]."""
        options: Any = {"ignore_index": _IGNORED, "label_smoothing": self.label_smoothing}
        losses = F.cross_entropy(logits.movedim(-1, 1), labels.long(), reduction="none", **options)
        counted = (labels != _IGNORED).reshape(len(labels), -1).sum(dim=1)
        return losses.reshape(len(labels), -1).sum(dim=1) / counted.clamp(min=1)

    def _at(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Cross entropy of a position, logits [batch, positions]; positions after the end of the text do not count."""
        positions = positions.reshape(len(logits)).clamp(min=0)
        return self._by_token(_precise(logits), positions.where(positions < logits.shape[1], _IGNORED))

    # ------------------------------------------------------------------ at the first batch

    def check(self, model: nn.Module, inputs: Mapping[str, Any], labels: Labels) -> None:
        """Raise an error unless this is the model's own loss on a few examples.

        The state of the random number generators does not change. An example without a finite ``out.loss`` is skipped.

        Raises:
            ValueError: The labels cannot be right, or the model computes another loss.
        """
        by_name = {"labels": labels} if isinstance(labels, Tensor) else labels
        plain = replace(self, label_smoothing=0.0)
        with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            for i in range(min(_EXAMPLES_TO_LOOK_AT, *map(len, by_name.values()))):
                one, its_labels = map_tensors(itemgetter(slice(i, i + 1)), (dict(inputs), dict(by_name)))
                try:
                    outputs = model(**one, **its_labels)
                    ours = float(plain(outputs, its_labels["labels"] if isinstance(labels, Tensor) else its_labels))
                except (RuntimeError, ValueError, IndexError) as error:
                    given = {name: f"{list(value.shape)} of {value.dtype}" for name, value in its_labels.items()}
                    fails = f"the loss of one example with {given} cannot be computed ({self.kind}): {error}"
                    raise ValueError(f"{fails}. Correct labels or config, or pass criterion=") from error
                if outputs.get("loss") is not None and bool(outputs["loss"].isfinite().all()):
                    self._compare(ours, outputs["loss"])

    def _compare(self, ours: float, own: Tensor) -> None:
        """Raise an error unless this loss is ``out.loss``."""
        theirs = float(own)
        if abs(ours - theirs) > _TOLERANCE.get(own.dtype, _LOOSE_TOLERANCE) * max(abs(theirs), 1e-3):
            differ = f"the model's own loss on an example is {theirs:.6g}, but FILTrainer's ({self.kind}) is {ours:.6g}"
            remedy = "Pass the loss you want as criterion=, a function of (logits, labels) that averages over examples."
            raise ValueError(f"{differ}: the model adds or weights what its logits do not show. {remedy}")


def _precise(logits: Tensor) -> Tensor:
    """The logits in at least float32, the lowest precision in which losses are computed."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
