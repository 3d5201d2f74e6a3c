"""The recorded pass as CUDA graphs: which graph serves a batch."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchfil.engine.measure import StepValues, Wanted, joined, values_of
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.estimators import Draws, draw_bits, signs_of
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.recording import RecordedJacobian, forward_pass
from torchfil.fisher.recording.graphs import CapturedPass, release_memory, signature
from torchfil.private import Examples
from torchfil.utils.trees import flattened, map_tensors

__all__ = ["CapturedPasses", "StartedGraph"]

logger = logging.getLogger(__name__)

_MOST_GRAPHS = 48
_GRAPHS_AT_ONCE = 16  # graphs that are captured at their first use
_USES_BEFORE_CAPTURING = 3  # of further ones
_MOST_ASKED = 256
_DEVIATIONS = (-1, 0, 1, 3)  # of a Poisson draw's size from its mean, in standard deviations


class CapturedPasses:
    """Runs batches through recorded passes that are CUDA graphs.

    A graph needs fixed shapes: a batch is padded with copies of its first example to one of a few sizes around the
    expected one (:meth:`size_for`), and the copies are masked out of the sum.

    Args:
        expected_batch: The mean batch size.
        probes_at_once: How many probes to process together.
        varies: Whether batches differ in size, as Poisson draws do.

    Attributes:
        works: False once capturing has failed.
    """

    def __init__(self, expected_batch: int, *, probes_at_once: int = 1, varies: bool = True) -> None:
        deviation = expected_batch**0.5
        usual = {math.ceil(expected_batch + k * deviation) for k in _DEVIATIONS}
        self._sizes = sorted({*usual, -(-expected_batch // 2)} - {0} if varies else {expected_batch})
        self._step = max(1, expected_batch // 8)
        self.probes_at_once = probes_at_once
        self.works = True
        self._captured: dict[tuple[Hashable, int], _Captured] = {}  # by kind and size
        self._pool: Any = None  # all graphs share one memory, because they are replayed one after the other
        self._replays = 0
        self._asked: Counter[tuple[Hashable, int]] = Counter()

    def size_for(self, count: int, room: int) -> int:
        """The size that a batch of ``count`` examples, at most ``room``, is padded to.

        Few sizes mean few graphs, which are all captured early. The expected batch b, of Poisson draws, gives b/2,
        b − √b, b, b + √b and b + 3√b; a larger batch has a multiple of b/8.
        """
        usual = [size for size in self._sizes if count <= size <= room]
        return usual[0] if usual else min(room, -(-count // self._step) * self._step)

    def begin(self, gradients: ExampleGradients, room: int, mode: Hashable) -> StartedGraph | None:
        """Replay the forward half of an existing graph for such examples; None: there is no such graph.

        Args:
            gradients: The examples, with their masks.
            room: As in :meth:`run`.
            mode: As in :meth:`run`.
        """
        size, own = self.size_for(len(gradients), room), signature(gradients)
        if len(gradients) > room:
            return None
        for (kind, its_size), captured in reversed(self._captured.items()):
            if its_size == size and kind[:2] == (own, mode):  # type: ignore[index]
                outputs = captured.begin(gradients.examples)
                self._replays += 1
                return None if outputs is None else StartedGraph(captured, self._replays, outputs)
        return None

    def run(
        self,
        batch: PrivateBatch,
        wanted: Wanted,
        room: int,
        mode: Hashable,
        begun: StartedGraph | None = None,
    ) -> StepValues | None:
        """The pass over a batch; None if it cannot be captured, or not yet. The next pass overwrites the result.

        A batch that is too large for one graph is run in pieces of equal size.

        Args:
            batch: At least one example.
            wanted: What the pass computes.
            room: How many examples a pass can hold in memory.
            mode: The state of the model that is built into the pass; a graph serves one state.
            begun: The result of :meth:`begin` for these examples, if it was called.
        """
        count = len(batch.gradients)
        if count <= room:
            return self._run(batch, wanted, self.size_for(count, room), mode, begun)
        at_once = -(-count // -(-count // room))
        parts = []
        for start in range(0, count, at_once):
            examples = batch.gradients.examples[slice(start, start + at_once)]
            piece = replace(batch, gradients=replace(batch.gradients, examples=examples))
            values = self._run(piece, wanted, self.size_for(at_once, room), mode)
            if values is None:
                return None
            parts.append(values.kept(sums=True))  # the next replay overwrites them
        return joined(parts)

    def _run(
        self, batch: PrivateBatch, wanted: Wanted, size: int, mode: Hashable, begun: StartedGraph | None = None
    ) -> StepValues | None:
        kind = (signature(batch.gradients), mode, wanted.kind, batch.mechanism)
        if not self.works or self._comes_too_rarely(kind, size):
            return None

        # A failed capture would fail again, and may have damaged the memory that the graphs share.
        captured, problem = None, ""
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            captured = self._captured.pop((kind, size), None)
            captured = captured or _Captured(batch, size, wanted, self._pool, probes_at_once=self.probes_at_once)
            self._captured[kind, size] = captured  # the latest comes last
            if len(self._captured) > _MOST_GRAPHS:  # each value of noise or threshold needs its own graph
                del self._captured[next(iter(self._captured))]
        except RuntimeError as error:
            captured, problem = None, str(error)
        if captured is None:  # outside the handler, because its error holds the pass's tensors
            logger.warning("the step could not be captured in a CUDA graph and runs eagerly: %s", problem)
            self.works = False
            self._captured.clear()
            self._pool = None
            release_memory()
            return None

        # The loop's forward pass is valid only if no other graph has overwritten its results.
        ready = begun is not None and begun.captured is captured and begun.replays == self._replays
        self._replays += 1
        return captured.replay(batch.gradients.examples, wanted, begun=ready)

    def _comes_too_rarely(self, kind: Hashable, size: int) -> bool:
        """Whether another graph is not worth capturing yet: one of many lengths, or for a noise that changes."""
        if (kind, size) in self._captured or len(self._captured) < _GRAPHS_AT_ONCE:
            return False
        if len(self._asked) >= _MOST_ASKED:  # a noise that changes at each step would need new graphs forever
            self._asked.clear()
        self._asked[kind, size] += 1
        return self._asked[kind, size] < _USES_BEFORE_CAPTURING


@dataclass(frozen=True)
class StartedGraph:
    """The forward half of a captured pass, which a training loop has run.

    Attributes:
        captured: The pass.
        replays: How many replays of graphs that share its memory there had been at that time.
        outputs: The model's outputs.
    """

    captured: _Captured
    replays: int
    outputs: Any


class _Captured:
    """One pass of fixed size as CUDA graphs, with the inputs that it reads: probes' bits, batch size and rate.

    Attributes:
        size: How many examples it takes.
        probes_at_once: How many probes it processes together.
    """

    def __init__(
        self,
        batch: PrivateBatch,
        size: int,
        wanted: Wanted,
        pool: Any,
        *,
        probes_at_once: int = 1,
    ) -> None:
        gradients, device = batch.gradients, batch.gradients.device
        self.batch, self.wanted, self.size = batch, wanted, size
        self.probes_at_once = probes_at_once

        # Inputs that change between replays stay at the addresses that the graph reads.
        self.bits = tuple(torch.zeros(gradients.num_parameters, dtype=torch.int8, device=device) for _ in wanted.seeds)
        self.source = torch.Generator(device=device)
        self.places = torch.arange(size, device=device)
        self.count = torch.full((), size, dtype=torch.long, device=device)
        self.rate = torch.full((), wanted.rate, dtype=torch.float64, device=device)

        self.captured = CapturedPass(gradients, size, self._stages, pool, num_stages=2)

    def begin(self, examples: Examples) -> Any:
        """The model's outputs for these examples, safe from later replays; None if some have no rows."""
        outputs = self.captured.begin(examples)
        leaves, _ = flattened(outputs)
        if not all(isinstance(leaf, Tensor) and leaf.shape[:1] == (self.size,) for leaf in leaves):
            return None
        return map_tensors(lambda leaf: leaf[: len(examples)].clone(), outputs)

    def replay(self, examples: Examples, wanted: Wanted, *, begun: bool = False) -> StepValues:
        """The pass over these examples; the next replay overwrites the result.

        Args:
            examples: The examples.
            wanted: The probes' seeds and the rate; everything else is built in.
            begun: Whether :meth:`begin` was the last replay, for these examples.
        """
        count = len(examples)
        self.count.fill_(count)
        if wanted.rate < 1:
            self.rate.fill_(wanted.rate)
        for bits, seed in zip(self.bits, wanted.seeds, strict=True):
            draw_bits(seed, bits, self.source)
        *_, values = self.captured.replay(examples, begun=begun)
        result: StepValues = values.first(count)
        return result

    def _stages(self, gradients: ExampleGradients) -> Iterator[Any]:
        """The outputs, then everything."""
        mechanism, z, measured = self.batch.mechanism, gradients.examples.z.detach(), bool(self.wanted.seeds)
        gradients = replace(gradients, twice=measured)
        forward = forward_pass(gradients, z.requires_grad_() if measured else z)
        yield map_tensors(Tensor.detach, forward.outputs)

        clip, threshold = mechanism.clip, mechanism.max_grad_norm
        jacobian = RecordedJacobian(gradients, clip, threshold, forward, measured=measured)
        probes = tuple(signs_of(bits, gradients.dtype) for bits in self.bits)
        draws = Draws(self.wanted.seeds, slice(0, self.size), self.size, 1, self.probes_at_once, probes)
        mask = (self.places < self.count).to(gradients.dtype)
        yield values_of(replace(self.batch, gradients=gradients), jacobian, self.wanted, draws, self.rate, mask)
