"""Replay of neighbours: a training function runs on two data sets that differ in one example, with equal randomness.

A private step releases Σ g̃_i + N(0, (σC)²I), divided by a public number. Trained on D and on D without example k (it is
left out of every batch; n stays) from the same weights, with the same noise, draws and dropout, two runs must show

    ‖Σ g̃ − Σ g̃′‖ ≤ C  where k was drawn,      Σ g̃ = Σ g̃′  where it was not.

The weights agree because each step hands the first run's release to the neighbour. What follows may not depend on k any
more, so weights, buffers, the optimizer's state and its settings must be equal at the next step. Equal noise hides wrong
noise, so its size and independence are tested in the first run alone, and so are the draws.

All that torch's own generators draw in the first run is kept, and a neighbour gets the rows of its examples. Adaptive
clipping (a second noisy release) and several processes are not covered.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

from torchfil.fisher.masks import _MASK_SECOND, _draws, _gives_all_it_draws, _visible_draws
from torchfil.utils import noise
from torchfil.utils.errors import require
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = ["Replay", "replay"]

Train = Callable[[Any], Any]
_LEVEL = 1e-6  # of each statistical test
_OUTLIER = 1000.0  # the factor of an example's numbers in the last run
_USE_STEPS = "Use the data through private steps only; make model and generators in train."
_REMEDIES = {  # of what must not depend on an example
    "choice of batches": "Take a step for every batch, and draw without looking at the data, from generators of train.",
    "model's weights": f"Something besides the noisy sum reached them. {_USE_STEPS}",
    "model's buffers": "They are released without noise. Replace BatchNorm and other running statistics by GroupNorm.",
    "optimizer's state": f"Something besides the noisy sum reached it. {_USE_STEPS}",
    "optimizer's settings": "Fix the learning rate and its schedule before the run, or steer them by public data.",
    "end of training": "Treat all examples alike: no branch, and no error, may depend on one.",
    "accounted q": "Fix the sampling rate without looking at the data.",
    "divisor": "Divide by a public number (the expected batch size), not by the size of a batch.",
    "σ": "Fix it without looking at the data.",
    "C": "Fix it without looking at the data.",
    "number of steps in a pass": "Fix it without looking at the data.",
}
_HIDDEN_N = (
    "With torchfil, give make_private sample_rate= and expected_batch_size=. Opacus 1.6 has no such options: its q and "
    "its divisor int(n·q) come from len(data) (opacus#571, opacus#819)."
)


@dataclass(frozen=True)
class Replay:
    """What a replay found.

    Guarantees:
        * A sound run fails each statistical test, of noise and draws, with probability 1e-6 at most. The comparisons of
          neighbours allow for rounding only.
        * Without findings nothing is proved: these neighbours showed no fault at these steps.

    Attributes:
        findings: A sentence for each kind of fault: the first step that shows it, the numbers and a remedy.
        releases: How many noisy sums each run released.
        examples: Who was left out, each in a run of its own.
    """

    findings: list[str]
    releases: int
    examples: list[int]

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        left_out = f"leaving out each of the examples {self.examples} showed no fault; this does not prove privacy"
        return "\n".join(self.findings) or f"In {self.releases} steps, {left_out}."


class _Stop(BaseException):
    """Enough steps were seen. Training loops may catch every ``Exception``, so this is none."""


@dataclass(frozen=True)
class _Release:
    """Who was drawn, the noisy sum and its noise, [d], and what the update is made from, by parameter."""

    optimizer: Any
    ids: list[int]
    noisy: Tensor
    noise: Tensor
    scaled: list[Tensor]


class _Neighbour(Dataset[Any]):
    """The user's data set, or its first ``size`` examples, some of them multiplied by a factor.

    Each reading of an example has a seed of its own, so augmentation is the same for all others.
    """

    def __init__(self, dataset: Any, size: int, factors: Mapping[int, float], seed: int) -> None:
        self.dataset, self.size, self.factors, self.seed, self.reads = dataset, size, factors, seed, Counter[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        place = range(self.size)[int(index)]
        self.reads[place] += 1
        seed, factor = noise.derived_seed(self.seed, f"read {place}", self.reads[place]), self.factors.get(place, 1.0)
        with _disable_current_modes(), noise.preserve_rng(seed=seed):
            sample = self.dataset[place]
            return map_tensors(lambda x: x * factor if factor != 1 and x.is_floating_point() else x, sample)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is unpickled
            raise AttributeError(name)
        if name == "tensors" and isinstance(self.dataset, TensorDataset):
            return tuple(map(torch.stack, zip(*(self[place] for place in range(self.size)), strict=True)))
        return getattr(self.dataset, name)


def _examples_of(dataset: Any, indices: Sequence[int]) -> list[int] | None:
    """The numbers of a loader's examples in our data set; None: it reads other data."""
    while dataset is not None and not isinstance(dataset, _Neighbour):
        if isinstance(dataset, Subset):
            indices = [dataset.indices[index] for index in indices]
        dataset = getattr(dataset, "dataset", None)
    return None if dataset is None else [int(index) for index in indices]


class _Tape(TorchDispatchMode):
    """Keeps what torch's own generators draw in the first run, and gives neighbours the same numbers by example."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))  # a neighbour draws as well: others watch the generators move
        if not _draws(func, args) or (kwargs or {}).get("generator") is not None or not _gives_all_it_draws(func):
            return result
        drawn = result[1] if func in _MASK_SECOND else result
        if self.run.first is None:
            self.run.tape.append((drawn.detach().clone(), self.run.batch))
        elif self.run.tape:
            drawn.copy_(self._rows(drawn.shape, *self.run.tape.pop(0)))
            if func in _MASK_SECOND and args[1] < 1:
                result[0].copy_(args[0] * drawn / (1 - args[1]))
        return result

    def _rows(self, shape: torch.Size, numbers: Tensor, ids: list[int]) -> Tensor:
        """The first run's numbers, without those of the example that is left out."""
        rows = torch.tensor([row for row, each in enumerate(ids) if each != self.run.without], device=numbers.device)
        for dim in [] if numbers.shape == shape else range(numbers.ndim):
            if ids and numbers.shape[dim] % len(ids) == 0:
                kept = numbers.unflatten(dim, (len(ids), -1)).index_select(dim, rows).flatten(dim, dim + 1)
                numbers = kept if kept.shape == shape else numbers
        other = f"random numbers of shape {tuple(shape)} instead of {tuple(numbers.shape)} cannot be coupled by example"
        require(numbers.shape == shape, f"{other}; use dropout 0 there for the replay")
        return numbers


class _Run:
    """A training run under the replay's eyes: all that it released, and what must not depend on an example.

    Args:
        train: The user's function.
        dataset: Its argument.
        steps: After how many releases to stop.
        seed: Of everything random.
        first: The run whose random numbers and releases this one gets; None: it has its own.
        without: The example that is left out of every batch.
    """

    def __init__(
        self, train: Train, dataset: Any, steps: int, seed: int, first: _Run | None = None, without: int | None = None
    ) -> None:
        self.first, self.without, self.steps, self.seed = first, without, steps, seed
        self.optimizers, self.modules, self.engines, self.sources = list[Any](), list[Any](), list[Any](), list[Any]()
        self.releases, self.facts = list[_Release](), list[dict[str, Any]]()  # one more of the facts, in the end
        self.tapes, self.drawn, self.batch = list[list[Any]](), list[list[int]](), list[int]()
        self.size, self.in_a_pass, self.sums, end = 0, 0, Tensor(), "its own end"
        self.error: Exception | None = None
        self._next_tape()
        try:
            with self._watching(), noise.preserve_rng(seed=seed), _visible_draws(), _Tape(self):
                train(dataset)
        except _Stop:
            end = "being stopped"
        except Exception as error:
            self.error, end = error, repr(error)
        self._note(**{"end of training": f"{len(self.releases)} steps and {end}"})

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(σ, q, steps) of all accountants."""
        return [entry for engine in self.engines for entry in engine.accountant.history]

    def _next_tape(self) -> None:
        step, before = len(self.releases), [] if self.first is None else self.first.tapes
        self.tape = list(before[step]) if step < len(before) else []
        self.tapes.append(self.tape)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Inside, optimizers, engines and loaders report here, and torchfil's noise is seeded."""

        def around(owner: Any, name: str, method: Callable[..., Any]) -> None:
            plain = getattr(owner, name)
            patch = mock.patch.object(owner, name, lambda *args, **options: method(plain, *args, **options))
            patches.enter_context(patch)

        with contextlib.ExitStack() as patches:
            around(DPOptimizer, "__init__", self._new_optimizer)
            around(PrivacyEngine, "__init__", self._new_engine)
            around(LoaderIterator, "_next_index", self._next_index)
            around(LoaderIterator, "__next__", self._next_batch)
            around(noise, "_from_the_system", self._new_source)
            around(noise, "Secure", lambda plain: noise.NoiseSource())
            yield

    def _new_source(self, plain: Any, device: torch.device) -> torch.Generator:
        self.sources.append(noise.derived_seed(self.seed, "noise", len(self.sources)))
        return torch.Generator(device).manual_seed(self.sources[-1])

    def _new_optimizer(self, init: Any, optimizer: Any, /, *args: Any, **options: Any) -> None:
        init(optimizer, *args, **options)
        add_noise, scale_grad = optimizer.add_noise, optimizer.scale_grad
        self.optimizers.append(optimizer)
        optimizer.add_noise = lambda: (self._begin(optimizer), add_noise())[1]
        optimizer.scale_grad = lambda: self._release(optimizer, scale_grad)

    def _new_engine(self, init: Any, engine: Any, /, *args: Any, **options: Any) -> None:
        init(engine, *args, **options)
        make = engine.make_private
        self.engines.append(engine)
        engine.make_private = lambda *a, **given: (
            self.modules.append(a[0] if a else given["module"]),
            make(*a, **given),
        )[1]

    def _next_index(self, plain: Any, iterator: Any) -> Any:
        batch = plain(iterator)
        ids = _examples_of(iterator._dataset, batch if isinstance(batch, list) else [batch])
        if ids is None:
            return batch
        require(isinstance(batch, list), "a loader with batch_size=None cannot be replayed; give it a batch size")
        self.size, self.in_a_pass = len(iterator._dataset), len(iterator)
        vars(iterator).setdefault("replayed", deque()).append(ids)  # workers fetch ahead
        return [place for place, each in zip(batch, ids, strict=True) if each != self.without]

    def _next_batch(self, plain: Any, iterator: Any) -> Any:
        content = plain(iterator)
        if vars(iterator).get("replayed"):
            self.batch = iterator.replayed.popleft()
            self.drawn.append(self.batch)
        return content

    def _begin(self, optimizer: Any) -> None:
        """Keep what noise is about to be added to."""
        if len(self.releases) == self.steps:
            raise _Stop
        self._note()
        self.sums = _flat(p.summed_grad for p in optimizer.params)

    def _note(self, **facts: Any) -> None:
        """Note the state from which the next step starts; tensors by checksums, as text in which NaN equals NaN."""
        inner = [optimizer.original_optimizer for optimizer in self.optimizers]
        tensors = {
            "model's weights": [p for optimizer in self.optimizers for p in optimizer.params],
            "model's buffers": [buffer for module in self.modules for buffer in module.buffers()],
            "optimizer's state": tensors_of([list(each.state.values()) for each in inner]),
        }
        groups = [{**group, "params": len(group["params"])} for each in inner for group in each.param_groups]
        sums = {
            name: str([(float(x.double().sum()), float(x.double().norm())) for x in parts])
            for name, parts in tensors.items()
        }
        settings = {"optimizer's settings": str(groups), "accounted q": {q for _, q, _ in self.history}}
        self.facts.append({"choice of batches": self.drawn, **sums, **settings, **facts})

    def _release(self, optimizer: Any, scale_grad: Callable[[], None]) -> None:
        """Keep what is released, and go on with the first run's release."""
        if len(self.facts) == len(self.releases):  # somebody replaced add_noise
            self._begin(optimizer)
        noisy = _flat(p.grad for p in optimizer.params)
        scale_grad()
        scaled = [p.grad.detach().clone() for p in optimizer.params]
        norm, step = float(_flat(scaled).norm()), len(self.releases)
        public = {"σ": float(optimizer.noise_multiplier), "C": float(optimizer.max_grad_norm)}
        public |= {"divisor": float(noisy.norm()) / norm if norm else 0.0, "number of steps in a pass": self.in_a_pass}
        self.facts[-1].update(public)
        ids = [each for batch in self.drawn for each in batch] if self.drawn or not step else self.releases[-1].ids
        self.releases.append(_Release(optimizer, ids, noisy, noisy - self.sums, scaled))
        for p, part in zip(optimizer.params, self.first.releases[step].scaled if self.first else scaled, strict=True):
            p.grad.copy_(part)
        self.drawn = []
        self._next_tape()


def _flat(parts: Iterable[Tensor]) -> Tensor:
    """[d], a copy in float64 on the CPU."""
    return torch.cat([part.detach().to("cpu", torch.float64, copy=True).flatten() for part in parts])


def _differences(one: _Run, other: _Run, k: int, how: str) -> Iterator[tuple[str, str]]:
    """What differs between runs that only example k may tell apart: the kind of fault, and a sentence."""
    for step, (a, b) in enumerate(zip(one.facts, other.facts, strict=False)):
        at = f"Step {step + 1}, {how}:"
        for name in [name for name in _REMEDIES if name in a.keys() & b.keys()]:
            was, now = a[name], b[name]
            if not (math.isclose(was, now, rel_tol=1e-6) if isinstance(was, float) else was == now):
                change = f" from {was:.6g} to {now:.6g}" if isinstance(was, float) else ""
                change = f" from {was} to {now}" if not change and len(f"{was}{now}") < 200 else change
                yield name, f"{at} the {name} changes{change}. {_REMEDIES[name]}"
                if name not in ("divisor", "σ", "C"):
                    return
        if step >= min(len(one.releases), len(other.releases)):
            return
        ours, theirs = one.releases[step], other.releases[step]
        gap, limit, drawn = float((ours.noisy - theirs.noisy).norm()), a["C"], ours.ids.count(k)
        eps = max(torch.finfo(part.dtype).eps for part in ours.scaled)
        slack = limit * (1e-4 + 10 * eps * len(ours.ids)) + 10 * eps * float(ours.noisy.norm())
        if not gap <= (limit if drawn else 0) + slack:
            mixed = "A path is not clipped, or examples of a batch are mixed (BatchNorm). Clip whole gradients, once."
            kept = "Something of it was kept from another batch, or all the data were read. Use public data for that."
            allowed = f"more than C = {limit:.4g}. {mixed}" if drawn else f"though {k} was not drawn. {kept}"
            yield f"sum {drawn > 0}", f"{at} the noisy sum changes by {gap:.4g}, {allowed}"


def _noise_faults(run: _Run, optimizer: Any) -> Iterator[tuple[str, str]]:
    """Whether noise has the size σC, for each parameter and each step, and is new at each step."""
    mine = [
        (release, fact["σ"] * fact["C"])
        for release, fact in zip(run.releases, run.facts, strict=False)
        if release.optimizer is optimizer
    ]
    if not mine or not all(scale > 0 for _, scale in mine):
        return
    noises = torch.stack([release.noise / scale for release, scale in mine])  # [steps, d]
    parts = noises.split([part.numel() for part in mine[0][0].scaled], dim=1)
    groups = [(f"parameter {place} {tuple(mine[0][0].scaled[place].shape)}", part) for place, part in enumerate(parts)]
    groups += [(f"step {step}", part) for step, part in enumerate(noises, 1)]
    for name, part in groups:
        total, count = float(part.square().sum()), part.numel()
        if stats.chi2.cdf(total, count) < _LEVEL / len(groups):
            size = f"The noise of {name} has {math.sqrt(total / count):.3g} times the standard deviation σC"
            yield "size of noise", f"{size} that is accounted for. Add N(0, (σC)²) to every coordinate at every step."
    unit = noises / noises.norm(dim=1, keepdim=True)
    alike = (unit @ unit.T).abs().triu(1)
    most = min(float(stats.norm.isf(_LEVEL / len(mine) ** 2)) / math.sqrt(noises.shape[1]), 0.9999)
    for one, other in (alike > most).nonzero().tolist():
        same = f"The noises of steps {one + 1} and {other + 1} have correlation {float(alike[one, other]):.3g}"
        yield "same noise", f"{same}. Draw new noise at each step; do not seed generators inside the loop."


def _draw_faults(run: _Run) -> Iterator[tuple[str, str]]:
    """Whether the accountants know of every release, and batches are drawn as they assume."""
    sizes, history, steps = [len(release.ids) for release in run.releases], run.history, len(run.releases)
    for step, release in enumerate(run.releases, 1):
        k, times = max(Counter(release.ids).items(), key=lambda each: each[1], default=(0, 0))
        if times > 1:
            twice = f"Step {step}: example {k} is drawn {times} times, so the sum may change by {times} C"
            yield "twice", f"{twice}. Draw each example at most once for a step."
    if not run.engines:  # nobody claims anything
        return
    counted = sum(times for *_, times in history)
    rate = sum(q * times for _, q, times in history) / max(counted, 1)
    everybody = Counter(each for release in run.releases for each in release.ids)
    needed = steps if rate < 1 else max(everybody.values(), default=0)
    if counted < needed:
        yield (
            "count",
            f"The accountant counts {counted} of {needed} releases. Attach its hook to the optimizer that steps.",
        )
    used = sorted((fact["σ"] for fact in run.facts[:steps]), reverse=True)
    claimed = sorted((sigma for sigma, _, times in history for _ in range(times)), reverse=True)
    for ours, theirs in zip(used, claimed, strict=False):
        if theirs > ours * (1 + 1e-9):
            yield (
                "accounted σ",
                f"The accountant counts σ = {theirs:.4g}, the optimizer adds {ours:.4g}. Give it the latter.",
            )
    if 0 < rate < 1 and stats.binom.sf(sum(sizes) - 1, run.size * steps, rate) < _LEVEL:
        expected = f"q = {rate:.4g} would draw {rate * run.size * steps:.0f}"
        yield (
            "rate",
            f"{sum(sizes)} examples were drawn in {steps} steps; the accountant's {expected}. Give it the true rate.",
        )
    often = Counter(sizes).most_common(1)[0]
    chances = stats.binom.pmf(range(run.size + 1), run.size, rate)
    if 0 < rate < 1 and stats.binom.sf(often[1] - 1, steps, chances).sum() < _LEVEL:
        fixed = f"{often[1]} of {steps} batches have {often[0]} examples, but the accountant assumes Poisson sampling"
        yield "fixed size", f"{fixed}. Use poisson_sampling=True, or count every participation with q = 1."


def _size_faults(run: _Run, smaller: _Run, n: int, size: int) -> Iterator[tuple[str, str]]:
    """What follows the number of examples, which is not public."""
    if smaller.error is not None:
        yield "hidden n", f"n is not public, but training on {size} examples ends with {smaller.error!r}. {_HIDDEN_N}"
        return
    for name in ("accounted q", "divisor", "number of steps in a pass"):
        was, now = ({**each.facts[0], **each.facts[-1]}[name] for each in (run, smaller))
        if not math.isclose(was, now, rel_tol=1e-6) if isinstance(was, float) else was != now:
            yield (
                "hidden n",
                f"n is not public, but the {name} is {was} for {n} examples and {now} for {size}. {_HIDDEN_N}",
            )


def replay(
    train: Train,
    dataset: Any,
    *,
    steps: int = 20,
    examples: Sequence[int] | None = None,
    n_is_public: bool = True,
    seed: int = 0,
) -> Replay:
    """Train on a data set and on its neighbours with equal randomness, and name what a private step may not do.

    Args:
        train: train(dataset) makes model, optimizer and loader, makes them private by Opacus's engine or torchfil's, and
            trains; any Opacus ``DPOptimizer`` is seen. It is stopped after ``steps`` releases and called five times,
            seven times if n is not public.
        dataset: With numbered examples; a few hundred suffice.
        steps: How many releases to compare.
        examples: Whom to leave out, by number; None: three at random of those who were drawn. The first is also
            multiplied by 1,000.
        n_is_public: Whether the number of examples is public, as zero-out adjacency assumes. False: sampling rate,
            divisor and number of steps in a pass must not follow it.
        seed: Of noise, draws, dropout and the choice of examples.

    Raises:
        ValueError: The data set has no numbered examples, or train takes no private step on it.
    """
    require(steps >= 1, f"steps={steps} must be at least 1")
    numbered = hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
    stream = f"{type(dataset).__name__} has no numbered examples, so none can be left out"
    require(numbered, f"{stream}; give a data set with a length, such as list(itertools.islice(stream, 500))")
    n = len(dataset)
    wrong = [each for each in examples or () if not 0 <= each < n]
    require(not wrong, f"examples={wrong} are not in the data set; give numbers from 0 to {n - 1}")

    def run(steps: int = steps, size: int = n, factors: Mapping[int, float] = {}, **options: Any) -> _Run:  # noqa: B006
        return _Run(train, _Neighbour(dataset, size, factors, seed), steps, seed, **options)

    first = run()
    if first.error is not None and not first.releases:
        raise first.error
    require(bool(first.releases), "train took no private step; let it step the optimizer that make_private returns")
    require(first.size > 0, "train made private steps, but no loader of the given data set; make its loader from that")
    batches = [batch for fact in first.facts[: len(first.releases)] for batch in fact["choice of batches"]]
    drawn = {each for batch in batches for each in batch}
    alone = {batch[0] for batch in batches if len(batch) == 1}  # without them a batch would be empty
    usual = sorted(drawn - alone or drawn)
    chosen = list(examples or random.Random(seed).sample(usual, min(3, len(usual))))

    found = list[tuple[str, str]]()
    limit = len(first.releases)
    for place, k in enumerate(chosen):
        neighbour = run(limit, factors={k: 0.0}, first=first, without=k)
        found += _differences(first, neighbour, k, f"without example {k}")
        if place == 0:
            outlier = run(limit, factors={k: _OUTLIER}, first=first)
            found += _differences(neighbour, outlier, k, f"with example {k} times {_OUTLIER:g} instead of left out")
    if first.error is not None and not found:
        raise first.error
    for optimizer in first.optimizers:
        found += _noise_faults(first, optimizer)
    found += _draw_faults(first)
    for size in () if n_is_public else (n - 1, n - max(2, n // 8)):
        found += _size_faults(first, run(1, size), n, size)
    return Replay(list(dict(reversed(found)).values())[::-1], limit, chosen)
