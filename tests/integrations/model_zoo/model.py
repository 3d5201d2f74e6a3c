"""What the table knows of a model: how it is built, what it is trained on, by which loss, and what
is private in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

EXAMPLES, LENGTH, WORDS, CLASSES = 6, 5, 13, 3
DROPOUT = 0.2


@dataclass(frozen=True)
class Model:
    """One line of the table.

    Attributes:
        name: As people call it.
        build: From the probability of dropout to the model, in float64 and in training mode.
        data: The examples: a data set of (input, target), or of dicts with "labels".
        loss: criterion(outputs, targets), the mean over the batch.
        drops: Whether it has dropout (or drops paths).
        loss_inside: Whether it computes its own loss when it is given labels.
        private: The submodules whose outputs are private by default; none: the floating-point
            inputs.
        criterion_needed: Whether the loss has to be given to ``make_private``: it has more than one
            part.
        collate: Makes a batch of examples; None: torch's own way.
    """

    name: str
    build: Callable[[float], nn.Module]
    data: Callable[[], Any]
    loss: Callable[[Any, Any], Tensor]
    drops: bool = True
    loss_inside: bool = False
    private: str | tuple[str, ...] = ()
    criterion_needed: bool = False
    collate: Callable[[list[Any]], Any] | None = None

    def made(self, dropout: bool) -> nn.Module:
        """The model with weights from a fixed seed, in training mode."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.build(DROPOUT if dropout else 0.0).double().train()


def seeded(seed: int = 0) -> torch.Generator:
    """A source of random numbers."""
    return torch.Generator().manual_seed(seed)


def drawn(*shape: int, source: torch.Generator | None = None) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, generator=source or seeded(), dtype=torch.float64)


def labelled(*shape: int) -> TensorDataset:
    """Pictures, rows of a table, …, with a class each."""
    source = seeded()
    x = drawn(EXAMPLES, *shape, source=source)
    return TensorDataset(x, torch.randint(CLASSES, (EXAMPLES,), generator=source))


def signals(key: str, *shape: int) -> list[dict[str, Tensor]]:
    """Pictures, waves or spectrograms as a processor gives them, with a class each."""
    source = seeded()
    return [
        {key: drawn(*shape, source=source), "labels": torch.randint(CLASSES, (), generator=source)}
        for _ in range(EXAMPLES)
    ]


def tokens() -> TensorDataset:
    """Texts as rows of word numbers, with a class each."""
    source = seeded()
    words = torch.randint(1, WORDS, (EXAMPLES, LENGTH), generator=source)
    return TensorDataset(words, torch.randint(CLASSES, (EXAMPLES,), generator=source))


def texts(labels: str = "class", *, segments: bool = False) -> list[dict[str, Tensor]]:
    """Texts as a tokenizer gives them: word numbers, padded at their end, and a mask.

    Args:
        labels: "class", "tokens" (a class for each word, −100 where there is none), "words" (the
            words themselves).
        segments: Whether ``token_type_ids`` are given.
    """
    source, examples = seeded(), []
    for i in range(EXAMPLES):
        mask = torch.arange(LENGTH) < LENGTH - i % 3
        words = torch.where(mask, torch.randint(3, WORDS, (LENGTH,), generator=source), 0)
        target = {
            "class": torch.randint(CLASSES, (), generator=source),
            "tokens": torch.randint(CLASSES, (LENGTH,), generator=source).where(mask, -100),
            "words": words.where(mask, -100),
        }[labels]
        kinds = {"token_type_ids": (torch.arange(LENGTH) > 2).long()} if segments else {}
        examples.append(
            {"input_ids": words, "attention_mask": mask.long(), "labels": target, **kinds}
        )
    return examples


def logits_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Cross-entropy of ``outputs.logits``."""
    return F.cross_entropy(outputs.logits, labels)


def token_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Cross-entropy of the logits of every word, −100 left out."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def causal_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Cross-entropy of every next word, −100 left out."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
