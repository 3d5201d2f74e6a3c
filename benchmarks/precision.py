"""The effect of lower precision on traces and clipped sums, against float64 with the same weights, data and probes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loops import MODELS, Model
from benchmarks.measuring import attempt
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.estimators import Draws
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.models import ProbePrecision
from torchfil.fisher.operator import ClippedJacobian, Jacobian
from torchfil.fisher.recording import RecordedJacobian, plan

__all__ = ["precision"]

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def tf32(*, matmul: bool, convolutions: bool) -> Iterator[None]:
    """Inside, TF32 is used for these operations on a GPU."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, convolutions
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def precision(names: list[str], device: str) -> dict[str, Any]:
    """By model and precision: median and largest relative error of the traces, relative error of the clipped sum.

    "float32" is without TF32; torch's default on a GPU uses TF32 only in convolutions. If the recorded pass does not
    support a precision, gradients are mapped over examples, and ``path`` says so.
    """
    return {name: _of_model(MODELS[name], device) for name in names}


def _of_model(model: Model, device: str) -> dict[str, Any]:
    examples = 32 if device.startswith("cuda") else (4 if model.cpu_batch <= 4 else 8)
    reference: list[Outcome] = []

    def in_double() -> dict[str, Any]:
        reference.append(_pass(model, examples, device, torch.float64))
        return {}

    modes: dict[str, dict[str, Any]] = {"float32": {}}
    if device.startswith("cuda"):
        modes["TF32 in convolutions (torch's default)"] = {"convolutions": True}
        modes["TF32 in convolutions and products"] = {"convolutions": True, "matmul": True}
        modes["TF32 in convolutions, probes in TF32 (our default)"] = {"convolutions": True, "probes": "tf32"}
    modes["probes in bfloat16"] = {"convolutions": True, "probes": "bfloat16"}
    modes["bfloat16 autocast around model and loss"] = {"convolutions": True, "autocast": True}
    modes["bfloat16 autocast, probes in bfloat16"] = {"convolutions": True, "autocast": True, "probes": "bfloat16"}

    def compared(mode: dict[str, Any]) -> dict[str, Any]:
        return _errors(_pass(model, examples, device, torch.float32, **mode), reference[0])

    result: dict[str, Any] = {"title": model.title, "examples": examples}
    failure = attempt(in_double)
    if failure:
        return result | {"rows": {"float64": failure}}
    rows = {title: attempt(lambda mode=mode: compared(mode)) for title, mode in modes.items()}  # type: ignore[misc]
    return result | {"rows": rows}


@dataclass(frozen=True)
class Outcome:
    """Traces from three probes, [batch], the clipped sum, [p], and how they were computed."""

    traces: Tensor
    clipped_sum: Tensor
    path: str


def _pass(
    model: Model,
    count: int,
    device: str,
    dtype: torch.dtype,
    *,
    matmul: bool = False,
    convolutions: bool = False,
    autocast: bool = False,
    probes: ProbePrecision | None = None,
) -> Outcome:
    torch.manual_seed(0)
    x, y = model.data(count)
    network, private = model.build().to(device, dtype), model.private
    x = x.to(device, dtype if x.is_floating_point() else x.dtype)
    with tf32(matmul=matmul, convolutions=convolutions):
        gradients = replace(
            ExampleGradients.build(network, nn.CrossEntropyLoss(), x, y.to(device), private),
            autocast=torch.bfloat16 if autocast else None,
            probe_precision=probes,
        )
        batch = PrivateBatch(gradients, Mechanism.build(1.0, 1.0))
        seeds = Draws.seeds_from(3, torch.Generator().manual_seed(0))
        try:
            return _recorded(batch, seeds)
        except RuntimeError as error:
            logger.info("no recorded pass: %s", error)
            return _mapped(batch, seeds)


def _recorded(batch: PrivateBatch, seeds: tuple[int, ...]) -> Outcome:
    recording = plan(batch.gradients)
    if recording.reason is not None:
        raise RuntimeError(recording.reason)
    jacobian = RecordedJacobian(batch.gradients, batch.mechanism)
    traces = _traces(batch, jacobian, seeds)
    return Outcome(traces, _flat(jacobian.clipped_sum()), "recorded")


def _mapped(batch: PrivateBatch, seeds: tuple[int, ...]) -> Outcome:
    jacobian = ClippedJacobian(batch.gradients, batch.mechanism.clip, batch.mechanism.max_grad_norm)
    traces = _traces(batch, jacobian, seeds)
    return Outcome(traces, jacobian.clipped_gradient.sum(dim=0).double(), "mapped over examples")


def _traces(batch: PrivateBatch, jacobian: Jacobian, seeds: tuple[int, ...]) -> Tensor:
    measurement = batch.measured(jacobian, ("trace",), "weight-probes", Draws(seeds, 1))
    return measurement.estimates["trace"].value.double()


def _flat(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts.values()]).double()


def _errors(outcome: Outcome, truth: Outcome) -> dict[str, Any]:
    relative = (outcome.traces / truth.traces - 1).abs()
    return {
        "trace_median": float(relative.median()),
        "trace_largest": float(relative.max()),
        "sum": float((outcome.clipped_sum - truth.clipped_sum).norm() / truth.clipped_sum.norm()),
        "path": outcome.path,
    }
