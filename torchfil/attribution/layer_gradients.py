"""The gradient of every example, split by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.fisher.gradients import DEFAULT_MAX_MEMORY, ExampleGradients, LossFunction
from torchfil.fisher.models import check_modules, check_unweighted_mean, trainable_and_constant, without_opacus
from torchfil.private import Examples, Inputs, as_call, check_finite, num_examples
from torchfil.utils.trees import map_tensors


def layer_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    x: Inputs,
    y: Any,
    batch: int | None = None,
    *,
    bias: bool = True,
) -> dict[str, Tensor]:
    """g_l = ∂ℓ/∂θ_l by layer, [n, N_l], or its mean over groups of examples, [n / batch, N_l].

    A layer is a module with its own trainable parameters, named as in ``model.named_modules()`` ("" for the model
    itself) and in that order; modules without parameters are left out. A shared parameter counts once, for the first
    module.

    Args:
        model: Any module without batch normalisation and active dropout; it is left unchanged.
        loss_fn: ``loss_fn(outputs, targets)``, an ordinary torch loss; mean and sum reduction give the same.
        x: Inputs [n, …], or a tuple or dict of them.
        y: Targets [n, …].
        batch: Average over groups of this many consecutive examples, like a client that sends one gradient for its
            batch. To look for a property of the group, put its examples next to each other.
        bias: Whether a layer's gradient includes its biases. Mo et al. define it with them (A.2), but give it the shape
            of the weights alone (eq. 2); an attacker sees both.

    Example:
        >>> gradients = layer_gradients(nn.Linear(2, 1), nn.MSELoss(), torch.ones(3, 2), torch.zeros(3, 1))
        >>> {layer: tuple(value.shape) for layer, value in gradients.items()}
        {'': (3, 3)}
    """
    whole = _without_private(model, loss_fn, x, y)
    n, size = len(whole), 1 if batch is None else batch
    if size < 1:
        raise ValueError(f"batch={batch} must be at least 1")
    if n % size:
        raise ValueError(f"batch={batch} must divide the {n} examples into whole groups; drop the last {n % size}")
    index = layer_index(whole.parameters, bias=bias)
    parts: dict[str, list[Tensor]] = {layer: [] for layer in index}
    rows_at_once = max(1, DEFAULT_MAX_MEMORY // (4 * size * whole.num_parameters * whole.dtype.itemsize))
    for _, piece in whole.examples.chunks(rows_at_once * size):
        gradients = replace(whole, examples=piece).gradients()  # [rows, p]
        means = gradients.unflatten(0, (-1, size)).mean(dim=1)
        for layer, columns in index.items():
            parts[layer].append(means[:, columns])
    return {layer: torch.cat(pieces) for layer, pieces in parts.items()}


def layer_index(parameters: dict[str, Tensor], *, bias: bool = True) -> dict[str, Tensor]:
    """For each layer, the places of its entries in the flat vector of all trainable parameters, [N_l].

    Example:
        >>> layer_index({"0.weight": torch.zeros(1, 2), "0.bias": torch.zeros(1)}, bias=False)
        {'0': tensor([0, 1])}
    """
    pieces: dict[str, list[Tensor]] = {}
    start = 0
    for name, value in parameters.items():
        layer, _, own = name.rpartition(".")
        places = torch.arange(start, start + value.numel(), device=value.device)
        start += value.numel()
        if bias or "bias" not in own:
            pieces.setdefault(layer, []).append(places)
    if not pieces:
        raise ValueError(f"every trainable parameter is a bias ({', '.join(parameters)}); use bias=True")
    return {layer: torch.cat(places) for layer, places in pieces.items()}


def _without_private(model: nn.Module, loss_fn: LossFunction, x: Inputs, y: Any) -> ExampleGradients:
    """As ExampleGradients.build, but only for gradients: nothing needs to be private, so integer inputs work."""
    live, model = without_opacus(model)
    check_modules(model)
    check_unweighted_mean(loss_fn)
    args, kwargs = as_call(x)
    n = num_examples(args, kwargs, y)
    if n == 0:
        raise ValueError("there is no example; pass at least one")
    check_finite(args, kwargs, y)
    parameters, constants = trainable_and_constant(live)
    if not parameters:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter (requires_grad=True), so it has no gradient; unfreeze "
            "the layers to examine"
        )
    first = next(iter(parameters.values()))
    nothing = torch.zeros(n, 0, dtype=first.dtype, device=first.device)
    public = map_tensors(Tensor.detach, (args, kwargs, y))
    return ExampleGradients(model, loss_fn, Examples(nothing, public), parameters, constants)
