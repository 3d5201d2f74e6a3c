"""How each layer of a model is accounted for: the rows of :func:`torchfil.check`'s table."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from torchfil.engine.checked import LayerCheck
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.recording import Plan
from torchfil.fisher.recording.record import record
from torchfil.fisher.rules.convolution import ConvolutionRule
from torchfil.fisher.rules.generic import GenericRule
from torchfil.fisher.rules.linear import EmbeddingRule, LinearRule
from torchfil.fisher.rules.normalisation import NormalisationRule
from torchfil.fisher.rules.parameters import ParameterRule, ReparametrisedRule

__all__ = ["layers_of", "median_seconds"]

_RULES_IN_WORDS: dict[type, str] = {
    GenericRule: "none: gradients formed example by example (vmap)",
    ReparametrisedRule: "weights made from parameters: closed form, then back to the parameters",
    ParameterRule: "bare parameter, where it meets the examples",
    LinearRule: "linear, closed form",
    ConvolutionRule: "convolution, closed form",
    EmbeddingRule: "embedding, closed form",
    NormalisationRule: "normalisation, closed form",
}
_Row = tuple[str, str, set[str], str, float | None, bool]  # as in LayerCheck, with the parameters by name
_MAPPED = "none: the whole model is mapped over examples (vmap)"
_LONG = 10.0  # seconds, after which a pass is not timed again


def layers_of(gradients: ExampleGradients, plan: Plan, max_memory: int) -> tuple[LayerCheck, ...]:
    """How each group of layers that hold trainable parameters is accounted for, in the order of the forward pass."""
    if not plan.fits:
        mapped: list[_Row] = [
            (name, type(module).__name__, set(own), _MAPPED, None, True)
            for name, module in gradients.model.named_modules()
            if (own := [key for key in gradients.parameters if key.rpartition(".")[0] == name])
        ]
        return _grouped(mapped, gradients.parameters)

    room = max(2, max_memory // max(1, plan.bytes_per_example))
    part = replace(gradients, examples=gradients.examples[slice(0, min(room, len(gradients)))])
    with torch.enable_grad(), part.backward_state():
        recording = record(part, part.examples.z.detach().requires_grad_())
        rows: list[_Row] = []
        for call in (call.wide() for call in recording.calls):
            seconds = median_seconds(partial(call.rule.squared_norm, call), part.device, 3)
            words = next((text for kind, text in _RULES_IN_WORDS.items() if isinstance(call.rule, kind)), None)
            kind = "Parameter" if isinstance(call.rule, ParameterRule) else type(call.module).__name__
            generic = isinstance(call.rule, GenericRule)
            names = set(call.shared_names.values())
            rows.append((call.name, kind, names, words or type(call.rule).__name__, 1e3 * seconds, generic))
    return _grouped(rows, gradients.parameters)


def _grouped(rows: list[_Row], parameters: Mapping[str, Tensor]) -> tuple[LayerCheck, ...]:
    """Rows grouped if their names differ only in numbers; a layer that is called several times counts once."""
    groups: dict[tuple[str, str, str, bool], list[tuple[str, set[str], float | None]]] = {}
    for name, kind, names, words, milliseconds, falls_back in rows:
        starred = re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "the model itself"
        groups.setdefault((starred, kind, words, falls_back), []).append((name, names, milliseconds))

    table = []
    for (starred, kind, words, falls_back), members in groups.items():
        names = set[str]().union(*(own for _, own, _ in members))
        count = len({name for name, _, _ in members})
        times = [milliseconds for _, _, milliseconds in members if milliseconds is not None]
        size = sum(parameters[name].numel() for name in names if name in parameters)
        shown = starred if count > 1 else members[0][0] or "the model itself"
        table.append(LayerCheck(shown, kind, count, size, words, sum(times) if times else None, falls_back))
    return tuple(table)


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of a call; the first call counts only if it takes very long."""
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
        if times[0] > _LONG:
            return times[0]
    return statistics.median(times[1:])
