"""How much each layer's gradient changes with the target or the input (Mo et al. 2021, eq. 2)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from scipy import stats
from torch import Tensor, nn

from torchfil.attribution.layer_gradients import layer_index
from torchfil.attribution.layer_table import LayerTable
from torchfil.fisher.gradients import DEFAULT_MAX_MEMORY, ExampleGradients, LossFunction
from torchfil.fisher.models import check_modules
from torchfil.private import Inputs, Private, as_call
from torchfil.utils.trees import map_tensors

Norm = Literal["fro", 1] | float


def jacobian_sensitivity(
    model: nn.Module,
    loss_fn: LossFunction,
    x: Inputs,
    y: Any,
    wrt: Literal["target", "input"] | Private = "target",
    norm: Norm = "fro",
    normalised: bool = True,
    chunk_size: int | None = None,
    *,
    bias: bool = True,
) -> LayerTable:
    """The mean over n examples of ‖∂g_l/∂t‖ / (ψ_l · range(g_l)) by layer, with its standard error.

    g_l ∈ R^{N_l} is the gradient of one example's loss with respect to layer l's parameters, t its target or its
    input, range(g) = max g − min g, and ψ_l = sqrt(N_l), N_l, 1 for the norms "fro", 1, ∞. Layers are those of
    :func:`layer_gradients`. ``normalised=False`` gives the mean of ‖∂g_l/∂t‖ alone.

    The norms are taken over all entries of the Jacobian [N_l, dim t]: the root of the sum of squares, the sum of
    absolute values, the largest absolute value. Mo et al. name "the 1-norm or the ∞-norm for vectors", which fits their
    ψ_l; it would fit the induced matrix norms, too.

    Guarantees:
        * Exact: every column of every example's Jacobian is computed, a few at a time.
        * Mean and sum reduction in ``loss_fn`` give the same numbers.
        * An example whose layer's gradient neither changes nor has a range (dead units) counts as 0; it counts as
          infinite if g_l has no range but changes. Dividing by the range gives well-fitted examples, whose gradient is
          nearly 0, the largest weight.

    Args:
        model: Any module without batch normalisation and active dropout; it is left unchanged.
        loss_fn: ``loss_fn(outputs, targets)``, an ordinary torch loss. With ``wrt="target"`` it must take continuous
            targets, as nn.CrossEntropyLoss (class probabilities) and nn.MSELoss do.
        x: Inputs [n, …], or a tuple or dict of them.
        y: Targets [n, …]. With ``wrt="target"`` class numbers are turned into one-hot probabilities.
        wrt: "target", "input" (every floating-point input), or any :class:`torchfil.Private`, such as
            ``Private(submodule="embedding")`` for a model of integer tokens.
        norm: "fro", 1 or ``float("inf")``.
        normalised: Whether to divide by ψ_l and the range.
        chunk_size: How many columns of length p (all parameters) to hold at once; None: as many as fit into 1 GiB.
        bias: Whether g_l includes the layer's biases, and N_l counts them; ``bias=False`` is the shape that Mo et al.
            give to G_l in eq. 2.

    Example:
        For ℓ = (wx − t)² with w = 0: g = −2tx, ∂g/∂t = −2x.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> jacobian_sensitivity(model, nn.MSELoss(), torch.tensor([[3.0]]), torch.ones(1, 1), normalised=False).value
        array([6.])
    """
    if norm not in ("fro", 1, math.inf):
        raise ValueError(f"norm={norm!r} must be 'fro', 1 or float('inf')")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1")
    batch = _prepared(model, loss_fn, x, y, wrt)
    if len(batch) == 0:
        raise ValueError("there is no example; pass at least one")

    index = layer_index(batch.parameters, bias=bias)
    columns = chunk_size
    if columns is None:
        columns = max(1, DEFAULT_MAX_MEMORY // (4 * batch.num_parameters * batch.dtype.itemsize))

    norms = _norms(batch, index, norm, columns)  # {layer: [n]}
    if normalised:
        ranges = _ranges(batch, index, columns)
        for layer, places in index.items():
            size = len(places)
            psi = math.sqrt(size) if norm == "fro" else float(size) if norm == 1 else 1.0
            scale = psi * ranges[layer]
            norms[layer] = torch.where(norms[layer] == 0, torch.zeros_like(scale), norms[layer] / scale)
    values = torch.stack(list(norms.values())).double().cpu()  # [layers, n]
    return _table(tuple(index), values, "sensitivity of gradients to " + _what(wrt), _unit(norm, normalised))


def _prepared(model: nn.Module, loss_fn: LossFunction, x: Inputs, y: Any, wrt: Any) -> ExampleGradients:
    check_modules(model)
    if isinstance(wrt, Private):
        return ExampleGradients.build(model, loss_fn, x, y, wrt)
    if wrt == "target":
        return ExampleGradients.build(
            model, loss_fn, x, _continuous(model, loss_fn, x, y), Private(inputs=(), target=True)
        )
    if wrt != "input":
        raise ValueError(f"wrt={wrt!r} must be 'target', 'input' or a torchfil.Private")
    args, kwargs = as_call(x)
    leaves = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
    if leaves and not any(leaf.is_floating_point() for leaf in leaves):
        raise TypeError(
            f"wrt='input' needs a floating-point input, got {', '.join(str(leaf.dtype) for leaf in leaves)}: integers "
            "have no derivative. Use wrt=Private(submodule='…') with the name of the embedding, or wrt='target'."
        )
    return ExampleGradients.build(model, loss_fn, x, y)


def _continuous(model: nn.Module, loss_fn: LossFunction, x: Inputs, y: Any) -> Tensor:
    """The targets themselves if they are floating-point, else one-hot class probabilities."""
    if not isinstance(y, Tensor):
        raise TypeError(f"wrt='target' needs a tensor of targets, got {type(y).__name__}")
    if y.is_floating_point() or len(y) == 0:
        return y

    # The model's output for one example shows the number of classes.
    args, kwargs = map_tensors(lambda leaf: leaf[:1], as_call(x))
    with torch.no_grad():
        output = model(*args, **kwargs)
    if not isinstance(output, Tensor) or output.ndim != y.ndim + 1 or output.shape[2:] != y.shape[1:]:
        what = f"outputs of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"targets of dtype {y.dtype} and shape {tuple(y.shape)} are not class numbers for {what} of one example; "
            "pass floating-point targets"
        )

    classes = output.shape[1]
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise ValueError(
            f"class numbers run from {int(y.min())} to {int(y.max())}, but the model gives {classes} outputs; they "
            f"must lie in 0 … {classes - 1}"
        )

    # Not every loss of class numbers takes probabilities; one example shows.
    probabilities = nn.functional.one_hot(y.long(), classes).movedim(-1, 1).to(output)
    try:
        loss_fn(output, probabilities[:1])
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"loss_fn does not take class probabilities as targets ({error}); wrt='target' needs a continuous target: "
            "use nn.CrossEntropyLoss()"
        ) from error
    return probabilities


def _norms(batch: ExampleGradients, index: dict[str, Tensor], norm: Norm, columns: int) -> dict[str, Tensor]:
    norms = {layer: torch.zeros(len(batch), dtype=batch.dtype, device=batch.device) for layer in index}
    d = max(1, batch.num_coordinates)
    width = min(columns, d)
    for rows, examples in batch.examples.chunks(max(1, columns // d)):  # whole examples, some coordinates at once
        piece = replace(batch, examples=examples)
        for start in range(0, batch.num_coordinates, width):
            jacobian = piece.jacobian_columns(slice(start, start + width))  # [rows, p, width]
            for layer, places in index.items():
                part = jacobian[:, places].flatten(1)
                total = norms[layer]
                if norm == math.inf:
                    total[rows] = torch.maximum(total[rows], part.abs().amax(dim=1))
                else:
                    total[rows] += part.square().sum(dim=1) if norm == "fro" else part.abs().sum(dim=1)
    return {layer: total.sqrt() for layer, total in norms.items()} if norm == "fro" else norms


def _ranges(batch: ExampleGradients, index: dict[str, Tensor], columns: int) -> dict[str, Tensor]:
    """The range max g_l − min g_l of every example, {layer: [n]}."""
    ranges = {layer: torch.zeros(len(batch), dtype=batch.dtype, device=batch.device) for layer in index}
    for rows, examples in batch.examples.chunks(columns):
        gradients = replace(batch, examples=examples).gradients()
        for layer, places in index.items():
            part = gradients[:, places]
            ranges[layer][rows] = part.amax(dim=1) - part.amin(dim=1)
    return ranges


def _table(layers: tuple[str, ...], values: Tensor, measure: str, unit: str) -> LayerTable:
    """Mean, standard error and 95 % Student interval over examples of values [layers, n]."""
    n = values.shape[1]
    mean = values.mean(dim=1)
    error = values.std(dim=1) / math.sqrt(n) if n > 1 else torch.full_like(mean, math.nan)
    width = error * float(stats.t.ppf(0.975, n - 1)) if n > 1 else error
    low, high = (mean - width).clamp(min=0), mean + width
    return LayerTable(layers, mean.numpy(), low.numpy(), high.numpy(), error.numpy(), measure, unit)


def _what(wrt: Any) -> str:
    if not isinstance(wrt, Private):
        return f"the {wrt}"
    return f"the output of {' and '.join(wrt.submodules)}" if wrt.submodules else "private coordinates"


def _unit(norm: Norm, normalised: bool) -> str:
    name = {"fro": "F", 1: "1", math.inf: "∞"}[norm]
    return f"{name}-norm / (ψ · range)" if normalised else f"{name}-norm"
