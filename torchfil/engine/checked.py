"""The result of :func:`torchfil.check` for a model, as an object, a table and a dict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["LayerCheck", "ModelCheck", "StepCost"]

_VERDICTS = {
    "recorded": "runs, in one recorded pass over the batch",
    "mapped": "runs, but gradients are mapped over examples (vmap), which is slower",
    "refused": "is refused",
}


@dataclass(frozen=True)
class LayerCheck:
    """Layers of one kind and place, and how their gradients are accounted for.

    Attributes:
        name: Their name, with * for numbers that differ.
        kind: Their class.
        count: How many there are.
        parameters: Trainable parameters of all of them.
        rule: The rule that serves them, in words.
        milliseconds: The time for the norms of their gradients, for the whole batch; None: not measured.
        falls_back: Whether they have no specific rule.
    """

    name: str
    kind: str
    count: int
    parameters: int
    rule: str
    milliseconds: float | None = None
    falls_back: bool = False


@dataclass(frozen=True)
class StepCost:
    """The median time of a pass over the batch, and its multiple of a plain forward and backward pass."""

    name: str
    milliseconds: float
    relative: float


@dataclass(frozen=True)
class ModelCheck:
    """What a training run with this model would do; ``str()`` gives it as a table.

    Attributes:
        model: The model's class.
        verdict: "recorded", "mapped" (over examples: slower) or "refused".
        reason: Why it is mapped or refused; None: it is recorded.
        loss: The loss that is accounted for, in words.
        private: What is private in every example, in words.
        num_coordinates: d, the most private coordinates of an example of the batch.
        layers: Rows of the table.
        not_smooth: Layers and calls whose derivative jumps, one line each; with them, bounds are not guarantees.
        costs: Times of passes over the batch on this machine.
        bytes_per_example: The memory that a pass needs for one example.
        batch_size: Examples in the batch.
        tried_in: The dtype in which the pass was compared with plain backward passes.
        advice: What to change, one line each.
    """

    model: str
    verdict: str
    batch_size: int
    reason: str | None = None
    loss: str | None = None
    private: str | None = None
    num_coordinates: int | None = None
    layers: tuple[LayerCheck, ...] = ()
    not_smooth: tuple[str, ...] = ()
    costs: tuple[StepCost, ...] = ()
    bytes_per_example: int | None = None
    tried_in: str | None = None
    advice: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether a training run with this model would start."""
        return self.verdict != "refused"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table of layers, one dict per row."""
        return [asdict(layer) for layer in self.layers]

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain types, for JSON."""
        return {"runs": self.runs, **asdict(self)}

    def __str__(self) -> str:
        """The table, followed by what to change."""
        lines = [f"{self.model}, batch of {self.batch_size}: {_VERDICTS[self.verdict]}"]
        facts = {
            "why": self.reason,
            "loss": self.loss,
            "private": self.private and f"{self.private}; d = {self.num_coordinates:,}",
            "tried in": self.tried_in and f"{self.tried_in}, against plain backward passes of two examples",
            "memory": self.bytes_per_example and f"about {_size(self.bytes_per_example)} an example",
        }
        lines += [f"{name + ':':<10}{text}" for name, text in facts.items() if text]
        if self.layers:
            lines += ["", *_table(("layer", "kind", "count", "parameters", "rule", "norms, ms"), self._cells())]
        if self.costs:
            costs = [(cost.name, f"{cost.milliseconds:.3g}", f"{cost.relative:.2f}") for cost in self.costs]
            lines += ["", *_table(("pass over the batch", "ms", "× plain"), costs, left=(0,))]
        lines += _listed("not smooth", self.not_smooth) + _listed("what to change", self.advice)
        return "\n".join(lines)

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                layer.name,
                layer.kind,
                str(layer.count),
                f"{layer.parameters:,}",
                layer.rule,
                "" if layer.milliseconds is None else f"{layer.milliseconds:.3g}",
            )
            for layer in self.layers
        ]


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0, 1, 4)) -> list[str]:
    """Lines with aligned cells; the columns ``left`` are left-aligned."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (names, *rows)
    ]


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"{title}:", *(f"  * {line}" for line in lines)] if lines else []


def _size(count: int) -> str:
    """Bytes in words."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
