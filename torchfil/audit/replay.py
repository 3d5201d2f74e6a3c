"""Replay of neighbours: a training function runs on two data sets that differ in one example, with
equal randomness.

A private step releases Σ g̃_i + N(0, (σC)²I), divided by a public number. Trained on D and on D
without example k (it is left out of every batch; n stays) from the same weights, with the same
noise, draws and dropout, two runs must show

    ‖Σ g̃ − Σ g̃′‖ ≤ C  where k was drawn,      Σ g̃ = Σ g̃′  where it was not.

The weights agree because each step hands the first run's release to the neighbour. What follows may
not depend on k, so weights, buffers, the optimizer's state and its settings must be equal at the
next step. Equal noise hides wrong noise, so its size and independence are tested in the first run
alone, and so are the draws.

If the run draws owners of several rows (``owner_of=``), "example k" is owner k, and nobody is
multiplied by 1,000.

All that torch's own generators draw in the first run is kept, and a neighbour gets the rows of its
examples. Adaptive clipping (a second noisy release) and several processes are not covered.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, SupportsInt
from unittest import mock

import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from scipy import stats
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

from torchfil.fisher.masks import _MASK_SECOND, _draws, _gives_all_it_draws, _visible_draws
from torchfil.utils import noise
from torchfil.utils.given import Args, Kwargs, Rows
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = ["Replay", "replay"]

Train = Callable[[Any], Any]
Examples = Sequence[int] | None
Findings = Iterator[tuple[str, str]]  # the kind of fault, and a sentence
_LEVEL = 1e-6  # of each statistical test
_REMEDIES = {  # of what must not depend on an example
    "choice of batches": "Take a step for every batch, and draw without looking at the data, by "
    "generators of train.",
    "checksum of weights and optimizer state": "Only noisy sums may reach them. Make the model in "
    "train, without data.",
    "checksum of buffers": "They are released without noise. Replace BatchNorm and running "
    "statistics by GroupNorm.",
    "setting of the optimizer": "Fix the learning rate and its schedule before the run, or steer "
    "them by public data.",
    "divisor": "Divide by a public number, such as the expected batch size, not by the size of a "
    "batch.",
    **dict.fromkeys(
        ("σ", "C", "accounted q", "number of steps in a pass"),
        "Fix it without looking at the data.",
    ),
}
_HIDDEN_N = (
    "With torchfil, give make_private sample_rate= and expected_batch_size=. Opacus 1.6 has no "
    "such options: its q and its divisor, int(n·q), come from len(data) (opacus#571, opacus#819)."
)


@dataclass(frozen=True)
class Replay:
    """What a replay found.

    Guarantees:
        * A sound run fails each statistical test, of noise and draws, with probability 1e-6 at
          most. The comparisons of neighbours allow for rounding only.
        * Without findings nothing is proved: these neighbours showed no fault at these steps.

    Attributes:
        findings: A sentence for each kind of fault: the first step that shows it, the numbers and a
            remedy.
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
        left_out = " and ".join(map(str, self.examples))
        compared = (
            f"Compared over {self.releases} steps: a run on all data and those without "
            f"example {left_out}"
        )
        nothing = (
            "noise and draws with what is accounted. No fault was seen, which does not "
            "prove privacy."
        )
        return "\n".join(self.findings) or f"{compared}; {nothing}"


class _StoppedByReplay(BaseException):
    """Enough steps were seen. Training loops may catch every ``Exception``, so this is none."""


class _Neighbour(Dataset[Any]):
    """The user's data set, or its first ``size`` examples, some of them multiplied by a factor.

    Each reading of an example has a seed of its own, so augmentation is the same for all others.
    """

    def __init__(self, dataset: Rows, size: int, factors: Mapping[int, float], seed: int) -> None:
        self.dataset, self.size, self.factors, self.seed, self.reads = (
            dataset,
            size,
            factors,
            seed,
            Counter[int](),
        )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: SupportsInt) -> Any:
        place = range(self.size)[int(index)]
        self.reads[place] += 1
        seed, factor = (
            noise.derived_seed(self.seed, f"read {place}", self.reads[place]),
            self.factors.get(place, 1.0),
        )
        with _disable_current_modes(), noise.preserve_rng(seed=seed):
            sample = self.dataset[place]
            return map_tensors(
                lambda x: x * factor if factor != 1 and x.is_floating_point() else x, sample
            )

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name == "tensors" and isinstance(self.dataset, TensorDataset):
            return tuple(map(torch.stack, zip(*self.__getitems__(range(self.size)), strict=True)))
        return getattr(vars(self).get("dataset"), name)


class _Run(TorchDispatchMode):
    """A training run under the replay's eyes: all that it released, and what must not depend on an
    example.

    As a dispatch mode, it keeps what torch's own generators draw in the first run, and gives a
    neighbour the same numbers by example.

    Args:
        train: The user's function.
        data: Its argument.
        steps: After how many releases to stop.
        seed: Of everything random.
        first: The run whose random numbers and releases this one gets; None: it has its own.
        without: The example that is left out of every batch.
    """

    def __init__(
        self,
        train: Train,
        data: _Neighbour,
        steps: int,
        seed: int,
        first: _Run | None = None,
        without: int | None = None,
    ) -> None:
        super().__init__()
        self.first, self.without, self.steps = first, without, steps
        self.count = self.size = self.in_a_pass = 0
        self.of_people = False

        # what the run did, batch by batch and release by release
        lists: Any = [], [], [], [], []
        self.optimizers, self.engines, self.buffers, self.states, self.drawn = lists
        self.released = self.drawn
        self.tapes: Any = defaultdict(
            list, {at: [*kept] for at, kept in first.tapes.items()} if first else {}
        )
        self.end: BaseException | None = None

        # Everything that the training makes itself is met as it is made, and all randomness follows
        # the seed.
        try:
            with (
                _around(DPOptimizer, "__init__", self._new_optimizer),
                _around(PrivacyEngine, "__init__", partial(_keep, self.engines)),
                _around(nn.Module, "register_buffer", partial(_keep, self.buffers)),
                _around(LoaderIterator, "_next_index", self._next_index),
                _around(DataLoader, "_get_iterator", _without_workers),
                _around(
                    noise,
                    "_from_the_system",
                    lambda _, device: torch.Generator(device).manual_seed(seed),
                ),
                _around(noise, "Secure", lambda _: noise.NoiseSource()),
                noise.preserve_rng(seed=seed),
                _visible_draws(),
                self,
            ):
                train(data)
        except (_StoppedByReplay, Exception) as end:
            self.end = end
        self._note()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        # a neighbour draws as well: others watch the generators move
        result = func(*args, **(kwargs or {}))
        if (
            not _draws(func, args)
            or not _gives_all_it_draws(func)
            or (kwargs or {}).get("generator") is not None
        ):
            return result
        drawn, tape = result[1] if func in _MASK_SECOND else result, self.tapes[self.count]
        # a fused layer on a GPU shows no draws
        if self.first is None and isinstance(drawn, Tensor):
            tape.append((drawn.detach().clone(), (self.drawn or [[]])[-1]))
        elif tape and isinstance(drawn, Tensor):
            drawn.copy_(self._rows(drawn.shape, *tape.pop(0)))
            if func in _MASK_SECOND and args[1] < 1:
                result[0].copy_(args[0] * drawn / (1 - args[1]))
        return result

    def _rows(self, shape: torch.Size, numbers: Tensor, ids: list[int]) -> Tensor:
        """The first run's numbers, without those of the example that is left out."""
        rows = torch.tensor(
            [row for row, each in enumerate(ids) if each != self.without], device=numbers.device
        )
        for dim in [dim for dim, size in enumerate(numbers.shape) if ids and size % len(ids) == 0]:
            kept = (
                numbers.unflatten(dim, (len(ids), -1)).index_select(dim, rows).flatten(dim, dim + 1)
            )
            numbers = kept if kept.shape == shape else numbers
        if numbers.shape != shape:
            raise ValueError(
                "random numbers cannot be coupled by example; use dropout 0 for the replay"
            )
        return numbers

    def _new_optimizer(
        self, init: Callable[..., None], optimizer: DPOptimizer, /, *args: object, **options: object
    ) -> None:
        init(optimizer, *args, **options)
        self.optimizers.append(optimizer)
        optimizer.scale_grad = partial(self._release, optimizer, optimizer.scale_grad)

    def _next_index(self, plain: Callable[..., Any], iterator: Any) -> Any:
        batch, dataset = plain(iterator), iterator._dataset
        ids = batch if isinstance(batch, list) else [batch]
        while dataset is not None and not isinstance(dataset, _Neighbour):
            ids = [dataset.indices[place] for place in ids] if isinstance(dataset, Subset) else ids
            # torchfil's, which draws owners of rows
            self.of_people = self.of_people or hasattr(dataset, "owners")
            dataset = getattr(dataset, "dataset", None)
        if dataset is None:  # a loader of other data
            return batch
        if not isinstance(batch, list):
            raise ValueError(
                "a loader with batch_size=None cannot be replayed; give it a batch size"
            )
        self.size, self.in_a_pass = len(iterator._dataset), len(iterator)
        self.drawn = [*([] if self.drawn is self.released else self.drawn), ids]
        return [place for place, each in zip(batch, ids, strict=True) if each != self.without]

    def history(self) -> list[tuple[float, float, int]]:
        """(σ, q, steps) of all accountants."""
        return [entry for engine, *_ in self.engines for entry in engine.accountant.history]

    def _note(self) -> None:
        """Note what the next step starts from; tensors as text, in which NaN equals NaN."""
        inner = [optimizer.original_optimizer for optimizer in self.optimizers]
        weights = tensors_of(
            [[[*each.state.values()] for each in inner], [each.params for each in self.optimizers]]
        )
        groups = [
            {**group, "params": len(group["params"])}
            for each in inner
            for group in each.param_groups
        ]
        state = {
            "choice of batches": self.drawn,
            "accounted q": str({q for _, q, _ in self.history()}),
        }
        buffers = _checksum(
            tensors_of([getattr(module, name, None) for module, name, *_ in self.buffers])
        )
        state |= {"setting of the optimizer": str(groups), "checksum of buffers": buffers}
        self.states.append({**state, "checksum of weights and optimizer state": _checksum(weights)})

    def _release(self, optimizer: DPOptimizer, scale_grad: Callable[[], None]) -> None:
        """Keep what is released, and go on with the first run's release."""
        if self.count == self.steps:
            raise _StoppedByReplay
        self._note()
        sums, noisy = (
            _flat(p.summed_grad for p in optimizer.params),
            _flat(p.grad for p in optimizer.params),
        )
        scale_grad()
        scaled, state = [p.grad.detach().clone() for p in optimizer.params], self.states[-1]
        divisor = float(noisy.norm() / _flat(scaled).norm().clamp(min=1e-300))
        state |= {
            "noisy": noisy,
            "noise": noisy - sums,
            "scaled": scaled,
            "optimizer": optimizer,
            "divisor": divisor,
        }
        state |= {"σ": float(optimizer.noise_multiplier), "C": float(optimizer.max_grad_norm)}
        state |= {
            "ids": [k for batch in self.drawn for k in batch],
            "number of steps in a pass": self.in_a_pass,
        }
        for p, part in zip(
            optimizer.params, (self.first or self).states[self.count]["scaled"], strict=True
        ):
            p.grad.copy_(part)
        self.released, self.count = self.drawn, self.count + 1


def _around(owner: object, name: str, method: Callable[..., Any]) -> Any:
    """Inside, a function is replaced by a method that takes it as its first argument."""
    plain = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **options: method(plain, *args, **options))


def _without_workers(plain: Callable[..., Any], loader: DataLoader[Any]) -> Any:
    loader.__dict__.update(num_workers=0, timeout=0)  # they would fetch ahead
    return plain(loader)


def _keep(
    kept: list[Any], plain: Callable[..., Any], new: object, /, *args: object, **options: object
) -> None:
    plain(new, *args, **options)
    kept.append((new, *args, *options.values()))


def _flat(parts: Iterable[Tensor]) -> Tensor:
    """[d], a copy in float64 on the CPU."""
    return torch.cat(
        [part.detach().to("cpu", torch.float64, copy=True).flatten() for part in parts]
    )


def _checksum(parts: Sequence[Tensor]) -> str:
    return str(
        [
            float(measure(_flat([Tensor(), *parts])))
            for measure in (torch.sum, torch.linalg.vector_norm)
        ]
    )


def _changed(was: Any, now: Any) -> str:
    """How a number or text differs, in words; empty: it does not."""
    same = math.isclose(was, now, rel_tol=1e-6) if isinstance(was, float) else was == now
    return (
        ""
        if same
        else " instead of ".join(
            f"{x:.6g}" if isinstance(x, float) else f"{x}"[:80] for x in (now, was)
        )
    )


def _differences(one: _Run, other: _Run, k: int, how: str) -> Findings:
    """What differs between runs that only example k may tell apart."""
    for step, (was, now) in enumerate(zip(one.states, other.states, strict=False)):
        at = f"Step {step + 1}, {how}: the"
        for name in [
            name
            for name in _REMEDIES
            if name in was.keys() & now.keys() and _changed(was[name], now[name])
        ]:
            yield name, f"{at} {name} is {_changed(was[name], now[name])}. {_REMEDIES[name]}"
            if name not in ("divisor", "σ", "C"):  # what follows would be about other weights
                return
        if step < min(one.count, other.count):
            gap, limit = float((was["noisy"] - now["noisy"]).norm()), was["C"]
            eps = 10 * torch.finfo(was["scaled"][0].dtype).eps
            slack = limit * (1e-4 + eps * len(was["ids"])) + eps * float(was["noisy"].norm())
            if k not in was["ids"] and not gap <= slack:
                why = (
                    "Something of it was kept from another batch, or all data were read. Use "
                    "public data for that."
                )
                yield (
                    "leak",
                    f"{at} noisy sum changes by {gap:.4g}, though example {k} was not drawn. {why}",
                )
            elif not gap <= limit + slack:
                why = (
                    "A path is not clipped, or examples of a batch are mixed (BatchNorm). Clip "
                    "whole gradients, once."
                )
                yield (
                    "sensitivity",
                    f"{at} noisy sum changes by {gap:.4g}, more than C = {limit:.4g}. {why}",
                )
    ends = _changed(*(f"after {run.count} steps: {run.end!r}" for run in (one, other)))
    if ends:
        yield (
            "end",
            f"Training {how} ends {ends}. Treat all examples alike: no branch or error may depend "
            "on one.",
        )


def _noise_faults(states: Sequence[Mapping[str, Any]]) -> Findings:
    """Whether one optimizer's noise has the size σC, for each parameter and each step, and is new
    at each step.
    """
    # [steps, d]
    noises = torch.stack([state["noise"] / (state["σ"] * state["C"]) for state in states])
    parts = noises.split([part.numel() for part in states[0]["scaled"]], dim=1)
    groups = [
        (f"parameter {place} of {part.shape[1]} numbers", part) for place, part in enumerate(parts)
    ]
    for name, part in groups + [(f"step {step}", part) for step, part in enumerate(noises, 1)]:
        ratio = float(part.square().mean())
        if stats.chi2.cdf(ratio * part.numel(), part.numel()) < _LEVEL / (len(parts) + len(noises)):
            size = f"The noise of {name} has {math.sqrt(ratio):.3g} times the standard deviation σC"
            yield "size of noise", f"{size}. Add N(0, (σC)²) to every coordinate at every step."
    unit = noises / noises.norm(dim=1, keepdim=True)
    alike = (unit @ unit.T).abs().triu(1)
    most = min(
        float(stats.norm.isf(_LEVEL / len(states) ** 2)) / math.sqrt(noises.shape[1]), 0.9999
    )
    for one, other in (alike > most).nonzero().tolist():
        same = (
            f"The noises of steps {one + 1} and {other + 1} have correlation "
            f"{float(alike[one, other]):.3g}"
        )
        yield (
            "same noise",
            f"{same}. Draw new noise at each step; do not seed generators inside the loop.",
        )


def _draw_faults(run: _Run) -> Findings:
    """Whether the accountants know of every release, and batches are drawn as they assume."""
    steps, history, batches = (
        run.count,
        run.history(),
        [Counter(state["ids"]) for state in run.states[: run.count]],
    )
    for step, k, times in [
        (step, *each) for step, batch in enumerate(batches, 1) for each in batch.items()
    ]:
        if times > 1:
            yield (
                "twice",
                f"Step {step}: example {k} is drawn {times} times. Draw each at most once for a "
                "step.",
            )
    sigmas, everybody = (
        [sigma for sigma, _, times in history for _ in range(times)],
        sum(batches, Counter[int]()),
    )
    counted, rate = len(sigmas), sum(q * times for _, q, times in history) / max(len(sigmas), 1)
    needed = steps if rate < 1 else max(everybody.values(), default=0)
    if run.engines and counted < needed:
        yield (
            "count",
            f"The accountant counts {counted} of {needed} releases. Attach its hook to the "
            "optimizer.",
        )
    used, claimed = (
        sum(each) / max(len(each), 1)
        for each in ([state["σ"] for state in run.states[:steps]], sigmas)
    )
    if claimed > used * (1 + 1e-9):
        yield (
            "claim",
            f"The accountant counts σ = {claimed:.4g}, the optimizer has {used:.4g}. Count the "
            "latter.",
        )
    total, mean, poisson = everybody.total(), rate * run.size * steps, 0 < rate < 1
    if poisson and stats.binom.sf(total - 1, run.size * steps, rate) < _LEVEL:
        expected = f"the accountant's q = {rate:.4g} gives {mean:.0f}"
        yield "rate", f"{total} examples were drawn; {expected}. Count the true q."
    size, times = Counter(batch.total() for batch in batches).most_common(1)[0]
    chances = stats.binom.pmf(range(run.size + 1), run.size, rate)
    if poisson and stats.binom.sf(times - 1, steps, chances).sum() < _LEVEL:
        fixed = (
            f"{times} of {steps} batches have {size} examples, but the accountant assumes "
            "Poisson sampling"
        )
        yield (
            "fixed size",
            f"{fixed}. Use poisson_sampling=True, or count every participation with q = 1.",
        )


def replay(
    train: Train,
    dataset: Rows,
    *,
    steps: int = 20,
    examples: Examples = None,
    n_is_public: bool = True,
    seed: int = 0,
) -> Replay:
    """Train on a data set and on its neighbours with equal randomness, and name what a private step
    may not do.

    Args:
        train: train(dataset) makes model, optimizer and loader, makes them private by Opacus's
            engine or torchfil's, and trains; any Opacus ``DPOptimizer`` is seen. It is stopped
            after ``steps`` releases and called five times, seven times if n is not public.
        dataset: With numbered examples; a few hundred suffice.
        steps: How many releases to compare.
        examples: Whom to leave out, by number; None: three at random of those who were drawn. The
            first is also multiplied by 1,000.
        n_is_public: Whether the number of examples is public, as zero-out adjacency assumes. False:
            sampling rate, divisor and number of steps in a pass must not follow it.
        seed: Of noise, draws, dropout and the choice of examples.

    Raises:
        ValueError: The data set has no numbered examples, or train takes no private step on it.
    """
    n = (
        len(dataset)
        if hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
        else 0
    )
    if not n > 0:
        raise ValueError(
            f"{type(dataset).__name__} has no numbered examples; give "
            "list(itertools.islice(stream, 500)) of it"
        )

    def run(steps: int, factors: Mapping[int, float], size: int = n, **options: Any) -> _Run:
        return _Run(train, _Neighbour(dataset, size, factors, seed), steps, seed, **options)

    first = run(steps, {})
    if not first.count or not first.size:
        raise (
            first.end
            if isinstance(first.end, Exception)
            else ValueError(
                "train took no private step; step the optimizer that make_private returns, on a "
                "loader of the data set that train is given"
            )
        )
    chosen = _chosen(first, examples, n, seed)

    found = list[tuple[str, str]]()
    for place, k in enumerate(chosen):
        neighbour = run(first.count, {} if first.of_people else {k: 0.0}, first=first, without=k)
        found += _differences(first, neighbour, k, f"without example {k}")
        if place == 0 and not first.of_people:  # a row would be changed, not a person
            outlier = run(first.count, {k: 1000.0}, first=first)
            found += _differences(
                neighbour, outlier, k, f"with example {k} times 1,000 instead of left out"
            )
    if isinstance(first.end, Exception) and not found:
        raise first.end
    for optimizer in first.optimizers:
        mine = [state for state in first.states[: first.count] if state["optimizer"] is optimizer]
        found += _noise_faults(mine) if mine and all(state["σ"] > 0 for state in mine) else []
    found += _draw_faults(first)
    for size in () if n_is_public else (n - 1, n - max(2, n // 8)):
        found += _size_faults(first, run(1, {}, size), size, n)
    return Replay(list(dict(found[::-1]).values())[::-1], first.count, chosen)


def _chosen(first: _Run, examples: Examples, n: int, seed: int) -> list[int]:
    """Whom to leave out; without the others a batch must not be empty."""
    batches = [batch for state in first.states for batch in state["choice of batches"]]
    drawn, alone = (
        {each for batch in batches if len(batch) < most for each in batch} for most in (n + 1, 2)
    )
    unseen = sorted(set(examples or ()) - drawn)
    if unseen:
        raise ValueError(
            f"examples={unseen} were not drawn in {first.count} steps; take more steps, or name "
            "others"
        )
    usual = sorted(drawn - alone or drawn)
    return list(examples or random.Random(seed).sample(usual, min(3, len(usual))))


def _size_faults(first: _Run, smaller: _Run, size: int, n: int) -> Findings:
    """What follows the number of examples, which is not public, in a run on fewer of them."""
    was, now = ({**each.states[0], **each.states[-1]} for each in (first, smaller))
    for name in ("accounted q", "divisor", "number of steps in a pass"):
        change = _changed(was[name], now.get(name, math.nan))
        if change:
            yield (
                "n",
                f"n is not public, but with {size} of {n} examples the {name} is {change}. "
                f"{_HIDDEN_N}",
            )
