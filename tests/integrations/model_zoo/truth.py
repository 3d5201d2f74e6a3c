"""Two private steps of a model, and the slow truth of them by plain reverse mode.

The run has all options as they are by default but the noise, so little that what is released is the
sum of clipped gradients, and ``amplification="none"``. Its probes u_k are noted, so that the traces
can be compared to 1e-6: with g̃ the clipped gradient of an example alone within its batch, J̃ =
∂g̃/∂z and P = I − ĝĝᵀ, a step of k probes adds

    (mean_k ‖J̃ᵀPu_k‖² + ‖J̃ᵀĝ‖²) / (σC)².

The truth never looks at masks: it runs the batch from the random state that the step began with, so
that torch draws the same numbers again. It calls the model as it is, without vmap, hooks of the
library or a rule for any layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from tests.engine.brute_force import SIGMA, C, random_state_kept, set_random_state
from tests.engine.ways import start
from torchfil import FILPrivacyEngine
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.engine import plans
from torchfil.fisher.estimators import ESTIMATORS, draw_bits, signs_of, weight_probes
from torchfil.utils.trees import map_tensors, tensors_of

from .model import Model, seeded

# model(**batch).loss in the loop, a torch loss in the loop, engine.train_step
WAYS = ("loss", "loop", "train_step")
STEPS, BATCH, PADDING = 2, 3, 0
TOLERANCE = 1e-6


@dataclass
class Step:
    """What a step began with, and what it released.

    Attributes:
        state: torch's random state.
        weights: The model's.
        batch: As the loader gave it.
        ids: The examples' numbers.
        seeds: Of the probes.
        released: Σ_i g̃_i, [p].
    """

    state: Tensor
    weights: dict[str, Tensor]
    batch: Any
    ids: list[int]
    seeds: tuple[int, ...]
    released: Tensor


@dataclass
class Trained:
    """A finished run with all that its truth needs.

    Attributes:
        model: What was trained.
        plain: A copy of the module, of before it was made private.
        engine: With the ledger.
        steps: One by one.
        mapped: Whether gradients were mapped over examples, or the pass was recorded.
    """

    model: Model
    plain: nn.Module
    engine: FILPrivacyEngine
    steps: list[Step]
    mapped: bool


def split(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Positional inputs, keyword inputs and targets of a batch."""
    if isinstance(batch, Mapping):
        return (), {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    return tuple(batch[:-1]), {}, batch[-1]


def trained(
    model: Model, way: str, *, dropout: bool, count: int = STEPS, **options: Any
) -> Trained:
    """The model after some steps; raises what the engine raises.

    Args:
        model: What to train.
        way: One of :data:`WAYS`.
        dropout: Whether it drops.
        count: How many steps.
        **options: Of ``make_private``.
    """
    module = model.made(dropout)
    trainable = {name: value for name, value in module.named_parameters() if value.requires_grad}
    plain = copy.deepcopy(module)
    data: Any = DataLoader(
        model.data(), batch_size=BATCH, collate_fn=model.collate, generator=seeded(2)
    )
    told = way == "train_step" or (way == "loop" and model.criterion_needed)
    given: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": C, "seed": 3, "lr": 0.3}
    given |= {"amplification": "none", "criterion": model.loss if told else None}
    given |= {"poisson_sampling": True, "noise_generator": seeded(5), **options}
    notes: list[tuple[int, ...]] = []
    steps: list[Step] = []
    torch.manual_seed(4)
    with noted_probes(notes) as estimator, mock.patch.object(plans.logger, "warning") as warning:
        engine, wrapped, optimizer, loader = start(
            module, data, "auto", estimator=estimator, **given
        )
        for batch in islice(chain.from_iterable(repeat(loader)), count):
            weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
            copied = copy.deepcopy(dict(batch) if isinstance(batch, Mapping) else list(batch))
            began = torch.get_rng_state(), weights, copied, list(batch._ids)
            notes.clear()
            take(model, way, engine, wrapped, optimizer, batch)
            grads = [value.grad.flatten() for value in trainable.values()]
            released = torch.cat(grads) * optimizer.expected_batch_size
            steps.append(Step(*began, notes[-1] if notes else (), released))
    mapped = any("mapped over examples" in call.args[0] for call in warning.call_args_list)
    return Trained(model, plain, engine, steps, mapped)


def take(
    model: Model, way: str, engine: FILPrivacyEngine, wrapped: Any, optimizer: Any, batch: Any
) -> None:
    """One step, as people write it."""
    if way == "train_step":
        args, kwargs, targets = split(batch)
        engine.train_step(kwargs or args, targets)
        return
    optimizer.zero_grad()
    if way == "loss":
        wrapped(**batch).loss.backward()
    else:
        args, kwargs, targets = split(batch)
        model.loss(wrapped(*args, **kwargs), targets).backward()
    optimizer.step()


@contextmanager
def noted_probes(notes: list[tuple[int, ...]]) -> Iterator[str]:
    """The name of an estimator that is the default one, and notes the seeds of its probes."""

    def noting(jacobian: Any, mechanism: Any, quantities: Any, draws: Any) -> Any:
        notes.append(draws.seeds)
        return weight_probes(jacobian, mechanism, quantities, draws)

    name = "noted-weight-probes"
    with mock.patch.dict(ESTIMATORS, {name: noting}):
        yield name


def clipped_and_products(run: Trained, step: Step) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each example in the batch g̃, [p], and J̃ᵀPu of every probe and J̃ᵀĝ, [probes + 1, d]."""
    module = copy.deepcopy(run.plain)
    module.load_state_dict(step.weights)
    # the same functions by others, of which torch has second derivatives
    for part in module.modules():
        if isinstance(part, nn.Hardsigmoid):
            part.forward = lambda x: F.relu6(x + 3) / 6  # type: ignore[method-assign]
        elif isinstance(part, nn.EmbeddingBag):
            part.forward = lambda words, part=part: F.embedding(words, part.weight).mean(dim=1)  # type: ignore
    parameters = [value for value in module.parameters() if value.requires_grad]
    args, kwargs, targets = split(step.batch)
    args, kwargs = map_tensors(
        lambda x: x.clone().requires_grad_() if x.is_floating_point() else x, (args, kwargs)
    )
    # what is private, as leaves
    seen = [leaf for leaf in tensors_of((args, kwargs)) if leaf.requires_grad]

    def moved(_module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        seen.append(torch.zeros_like(output).requires_grad_())
        # tokens of the batch, as it is
        if any(torch.equal(inputs[0], leaf) for leaf in kwargs.values()):
            # what stands at padding is nobody's
            return output + seen[-1] * (inputs[0] != PADDING)[..., None]
        return output + seen[-1]

    if run.model.private:
        seen.clear()
    for name in (run.model.private,) if isinstance(run.model.private, str) else run.model.private:
        module.get_submodule(name).register_forward_hook(moved)

    # The whole batch with the numbers that the step drew, then the loss of one example after the
    # other.
    set_random_state(step.state)
    outputs = module(*args, **kwargs)
    clip = get_clip(DEFAULT_CLIP)
    for i in range(len(step.ids)):
        loss = run.model.loss(*map_tensors(lambda leaf, i=i: leaf[i : i + 1], (outputs, targets)))
        g = flat_gradient(loss, parameters, create_graph=True)
        clipped = g / clip.c(g.norm() / clip.threshold(C))
        unit = (clipped / clipped.norm()).detach()
        signs = [
            signs_of(draw_bits(seed, torch.empty(len(g), dtype=torch.int8)), g.dtype)
            for seed in step.seeds
        ]
        vectors = [*(u - (unit @ u) * unit for u in signs), unit]
        products = [
            flat_gradient(clipped, seen, grad_outputs=vector, retain_graph=True)
            for vector in vectors
        ]
        yield clipped.detach(), torch.stack(products)


def flat_gradient(value: Tensor, leaves: Sequence[Tensor], **options: Any) -> Tensor:
    """∂value/∂leaves as one vector, 0 where one is not used."""
    parts = torch.autograd.grad(value, leaves, materialize_grads=True, **options)
    return torch.cat([part.flatten() for part in parts])


def assert_true(run: Trained) -> None:
    """Every example's trace after the steps, and what each step released, are those of brute force
    to 1e-6.
    """
    ledger = run.engine.ledger
    assert ledger is not None, "no step was measured"
    traces = torch.zeros(ledger.num_examples, dtype=torch.float64)
    for step in run.steps:
        total = torch.zeros_like(step.released)
        with random_state_kept(), sdpa_kernel(SDPBackend.MATH):
            for number, (clipped, products) in zip(
                step.ids, clipped_and_products(run, step), strict=True
            ):
                squares = products.square().sum(dim=1)
                traces[number] += (squares[:-1].mean() + squares[-1]) / (SIGMA * C) ** 2
                total += clipped
        error = float((step.released - total).norm()) / max(float(total.norm()), C)
        assert error < TOLERANCE, f"what was released is off by {error:.1e}"

    # One example after the other: a large trace must not hide that a small one is wrong.
    took_part = sorted({number for step in run.steps for number in step.ids})
    assert took_part
    measured = run.engine.totals.get_trace().value.double()
    assert float(traces[took_part].min()) > 0, "an example that took part leaks nothing"
    errors = ((measured - traces).abs() / traces)[took_part]
    assert float(errors.max()) < TOLERANCE, f"the traces are off by up to {float(errors.max()):.1e}"
