"""From a measurement of one step to what the ledger adds for it."""

from __future__ import annotations

import torch
from torch import Tensor

from torchfil.fisher.batch import Measurement
from torchfil.fisher.estimators import Quantity

__all__ = ["additions"]


def additions(measurement: Measurement, rate: float | Tensor, *, skipping: bool) -> dict[str, Tensor]:
    """The fields of :class:`torchfil.accounting.ledger.Contribution` by name, [batch, …] each, in float64.

    A step that is measured with probability π counts X/π, which has the variance X²(1−π)/π² + v/π, v being that of X.

    Args:
        measurement: Of a step that was measured.
        rate: π.
        skipping: Whether π < 1; then the variance rests on single values, and nothing is certain.
    """

    def weighted(quantity: Quantity) -> tuple[Tensor, Tensor]:
        estimate = measurement.estimates[quantity]
        value, variance = estimate.value.double(), estimate.standard_error.double().square()
        if not skipping:
            return value, variance
        return value / rate, value.square() * ((1 - rate) / rate**2) + variance / rate

    trace, variance = weighted("trace")
    estimate = measurement.estimates["trace"]
    freedom = 1.0 if skipping else estimate.degrees_of_freedom
    square = (estimate.value.double().square() - estimate.standard_error.double().square()).clamp(min=0)
    result = {
        "trace": trace,
        "variance": variance,
        "variance_spread": variance.square() / freedom,
        "square": square / rate,
    }
    if not skipping and estimate.kind == "exact":
        result |= {"certain": trace, "variance_limit": torch.zeros_like(trace)}
    elif not skipping and estimate.variance_limit is not None:
        result["variance_limit"] = estimate.variance_limit.double()
        if estimate.certain is not None:
            result["certain"] = estimate.certain.double()
    if "diagonal" in measurement.estimates:
        result["diagonal"], result["diagonal_variance"] = weighted("diagonal")
    if "matrix" in measurement.estimates:
        result["fim"] = weighted("matrix")[0]
    if measurement.products is not None:
        result["sketch"] = measurement.products / rate
    if measurement.susceptibility is not None:
        result["plis"] = measurement.susceptibility / rate
    return result
