"""Training loops with all that each step saw, and the slow truth of it, dropout's masks included.

The truth never looks at masks: it runs the whole batch from the random state that the loop's own forward pass began
with, so that torch draws the same numbers once more, and differentiates one example's clipped gradient after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import TensorDataset

from tests.cases import DEVICE, grouped, relative_error
from tests.engine.loops import loader
from torchfil import FILPrivacyEngine, Private
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.fisher import reference
from torchfil.fisher.masks import recorded_masks, replayed_masks

SIGMA, C = 1e-9, 0.5  # of so little noise p.grad is the sum of clipped gradients
RANDOM_STATES = (torch.get_rng_state, torch.cuda.get_rng_state)


@dataclass
class Pass:
    """One forward pass of the loop: the random state and the weights before it, and its batch."""

    state: Tensor
    weights: dict[str, Tensor]
    x: Tensor
    y: Tensor
    ids: list[int]


@dataclass
class Run:
    engine: FILPrivacyEngine
    module: nn.Module
    plain: nn.Module  # a copy, of before it was made private
    model: Any
    optimizer: Any
    private: Any
    passes: list[list[Pass]] = field(default_factory=list)  # of every logical step
    released: list[Tensor] = field(default_factory=list)  # Σ_i g̃_i of every step, [p]


def random_state() -> Tensor:
    return RANDOM_STATES[DEVICE == "cuda"]()


def set_random_state(state: Tensor) -> None:
    (torch.cuda.set_rng_state if DEVICE == "cuda" else torch.set_rng_state)(state)


@contextmanager
def random_state_kept() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


def make(
    module: nn.Module, dataset: Any, *, batch_size: int = 4, learning_rate: float = 0.3, seed: int = 4, **options: Any
) -> Run:
    """A run that is ready to train; the noise and the batches have generators of their own."""
    module.to(DEVICE)
    engine = FILPrivacyEngine()
    given: dict[str, Any] = {
        "noise_multiplier": SIGMA,
        "max_grad_norm": C,
        "seed": 3,
        "estimator": "exact",
        "amplification": "none",
        "noise_generator": torch.Generator(DEVICE).manual_seed(5),
        **options,
    }
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=learning_rate)
    plain = copy.deepcopy(module)
    torch.manual_seed(seed)
    private = engine.make_private(module, optimizer, loader(dataset, batch_size), **grouped(**given))
    return Run(engine, module, plain, *private)


def begin(run: Run, batch: Any) -> Pass:
    """What a pass over this batch begins with."""
    weights = {name: value.detach().clone() for name, value in run.module.state_dict().items()}
    x, y = (part.to(DEVICE) for part in batch)
    return Pass(random_state(), weights, x, y, list(batch._ids))


def take(run: Run, batch: Any, way: str = "auto", loss_fn: Callable[..., Tensor] = F.cross_entropy) -> Pass:
    """A forward and a backward pass and ``optimizer.step()``, or ``train_step``; what it began with."""
    begun = begin(run, batch)
    if way == "train_step":
        run.engine.train_step(begun.x, begun.y)
        return begun
    run.optimizer.zero_grad()
    loss_fn(run.model(begun.x), begun.y).backward()
    state = random_state()
    run.optimizer.step()
    assert torch.equal(random_state(), state), "the accounting draws from torch's own stream"
    return begun


def train(run: Run, *, steps: int = 3, way: str = "auto", physical: int | None = None) -> Run:
    """So many logical steps."""
    names = {id(value): name for name, value in run.module.named_parameters()}

    def through(batches: Any) -> None:
        pending: list[Pass] = []
        for batch in batches:
            pending.append(take(run, batch, way))
            if run.optimizer.inside_logical_batch:
                continue
            run.passes.append(pending)
            pending = []
            grads = {names[id(p)]: p.grad for p in run.optimizer.params}
            flat = torch.cat([grads[name].flatten() for name in names.values() if name in grads])
            run.released.append(flat * run.optimizer.expected_batch_size)
            if len(run.passes) == steps:
                return

    while len(run.passes) < steps:
        if physical is None:
            through(run.private)
        else:
            with BatchMemoryManager(
                data_loader=run.private, max_physical_batch_size=physical, optimizer=run.optimizer
            ) as batches:
                through(batches)
    return run


def clipped_gradient_of_one(
    module: nn.Module, begun: Pass, submodule: str | None, loss_fn: Callable[..., Tensor]
) -> tuple[Callable[[Tensor, int], Tensor], Tensor]:
    """g̃, [p], as a function of z and of the example's place in its batch, and the z of all, [batch, …]."""
    at = copy.deepcopy(module)
    at.load_state_dict(begun.weights)
    parameters = {name: value.detach() for name, value in at.named_parameters() if value.requires_grad}
    clip = get_clip(DEFAULT_CLIP)
    private: Tensor = begun.x
    if submodule is not None:
        seen: list[Tensor] = []
        handle = at.get_submodule(submodule).register_forward_hook(lambda _m, _i, output: seen.append(output))
        with random_state_kept(), torch.no_grad():
            at(begun.x)
        handle.remove()
        private = torch.zeros_like(seen[0])

    # The same numbers, not the same state: inside transforms a layer's output may lie otherwise in memory. (A GPU draws
    # with and without gradients by different operations, and there the state decides.)
    masks: list[Tensor] = []
    if DEVICE == "cpu":
        with random_state_kept(), sdpa_kernel(SDPBackend.MATH), torch.no_grad(), recorded_masks() as masks:
            set_random_state(begun.state)
            at(begun.x)

    def clipped_gradient(z: Tensor, i: int) -> Tensor:
        moved = torch.cat([private[:i], z[None], private[i + 1 :]])

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            set_random_state(begun.state)
            with replayed_masks(masks):
                if submodule is None:
                    outputs = functional_call(at, parameters, (moved,))
                else:
                    handle = at.get_submodule(submodule).register_forward_hook(lambda _m, _i, output: output + moved)
                    try:
                        outputs = functional_call(at, parameters, (begun.x,))
                    finally:
                        handle.remove()
            return loss_fn(outputs[i : i + 1], begun.y[i : i + 1])

        g = torch.cat([part.flatten() for part in grad(loss)(parameters).values()])
        clipped: Tensor = g / clip.c(g.norm() / clip.threshold(C))
        return clipped

    return clipped_gradient, private


def clipped_gradients(
    module: nn.Module, begun: Pass, submodule: str | None = None, loss_fn: Callable[..., Tensor] = F.cross_entropy
) -> Tensor:
    """g̃ of a pass, [batch, p]; arguments as in :func:`clipped_and_jacobian`."""
    of_one, private = clipped_gradient_of_one(module, begun, submodule, loss_fn)
    with random_state_kept(), sdpa_kernel(SDPBackend.MATH):
        return torch.stack([of_one(row, i) for i, row in enumerate(private)]).detach()


def clipped_and_jacobian(
    module: nn.Module, begun: Pass, submodule: str | None = None, loss_fn: Callable[..., Tensor] = F.cross_entropy
) -> tuple[Tensor, Tensor]:
    """g̃, [batch, p], and ∂g̃/∂z, [batch, p, d], of a pass: one example at a time, within its whole batch.

    Args:
        module: The model without hooks, in the mode that it was trained in.
        begun: What the pass began with.
        submodule: Whose output is private; None: the input.
        loss_fn: The loop's loss.
    """
    of_one, private = clipped_gradient_of_one(module, begun, submodule, loss_fn)

    def twice(z: Tensor, i: int) -> tuple[Tensor, Tensor]:
        return (of_one(z, i),) * 2

    with random_state_kept(), sdpa_kernel(SDPBackend.MATH):
        pairs = [jacrev(twice, has_aux=True)(row, i) for i, row in enumerate(private)]
    jacobians, values = map(torch.stack, zip(*pairs, strict=True))
    return values.detach(), jacobians.flatten(2).detach()


def truth(
    run: Run, *, private: Private | None = None, q: float | None = None, sigma: float = SIGMA
) -> tuple[Tensor, list[Tensor]]:
    """Each example's trace, [n], and Σ_i g̃_i of every step, [p]; q: with Poisson's factors."""
    submodule = None if private is None else private.submodule
    ledger = run.engine.ledger
    assert ledger is not None
    traces, sums = torch.zeros(ledger.num_examples, dtype=torch.float64), []
    for passes, released in zip(run.passes, run.released, strict=True):
        total = torch.zeros_like(released)
        for begun in passes:
            if not begun.ids:
                continue
            clipped, jacobian = clipped_and_jacobian(run.plain, begun, submodule)
            total += clipped.sum(dim=0)
            if q is None:
                part = jacobian.square().sum(dim=(1, 2)) / (sigma * C) ** 2
            else:
                part = torch.einsum("bii->b", reference.poisson_fim(jacobian, clipped, sigma * C, q))
            traces[begun.ids] += part.cpu()
        sums.append(total)
    return traces, sums


def assert_released(run: Run, sums: list[Tensor]) -> None:
    """What every step released is that sum of clipped gradients, to 1e-6."""
    for released, total in zip(run.released, sums, strict=True):
        assert float((released - total).norm()) < 1e-6 * max(float(total.norm()), C)


def assert_true(run: Run, **options: Any) -> None:
    """Traces and released sums are those of brute force to 1e-6."""
    traces, sums = truth(run, **options)
    assert float(traces.max()) > 0
    assert relative_error(run.engine.totals.get_trace().value, traces) < 1e-6
    if options.get("sigma", SIGMA) == SIGMA:
        assert_released(run, sums)


def images(count: int = 16, size: int = 4, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, size, size, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(classes, (count,), generator=generator))


def texts(count: int = 16, length: int = 4, vocabulary: int = 9, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (count, length), generator=generator)
    return TensorDataset(tokens, torch.randint(classes, (count,), generator=generator))
