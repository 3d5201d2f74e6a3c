"""Recorded passes as CUDA graphs: small networks spend most of their time launching kernels.

A graph needs fixed shapes: a batch is padded with copies of its first example to one of a few sizes
around the expected one (:meth:`Graphs.size_for`), and the copies are masked out of the sum. It
reads its inputs at fixed addresses.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchfil.engine.forward import StartedGraph
from torchfil.engine.measure import (
    Bound,
    Measure,
    Memory,
    StepValues,
    Wanted,
    joined,
    values_of,
)
from torchfil.engine.replica import Replica
from torchfil.fisher.estimators import Draws, draw_bits, signs_of
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.recording import RecordedForward, RecordedJacobian, forward_pass
from torchfil.fisher.recording.graphs import CapturedPass, release_memory, signature
from torchfil.private import Examples
from torchfil.utils.trees import flattened, map_tensors

logger = logging.getLogger(__name__)

_MOST_GRAPHS = 48
_GRAPHS_AT_ONCE = 16  # graphs that are captured at their first use
_USES_BEFORE_CAPTURING = 3  # of further ones
_MOST_ASKED = 256
# of a Poisson draw's size from its mean, in standard deviations
_DEVIATIONS = (-1, -0.4, 0.2, 0.8, 1.6)


def captured(measure: Measure, graphs: Graphs, memory: Memory) -> Measure:
    """By a CUDA graph, as far as graphs serve and the loop has not begun another pass."""

    def run(bound: Bound, mechanism: Mechanism, probes: Draws, wanted: Wanted) -> StepValues:
        values = None
        if not isinstance(bound.forward, RecordedForward) and graphs.serve(bound.gradients):
            room = memory.room(bound.tried.bytes_per_example)
            memory.at_once = min(len(bound.gradients), room)
            memory.each = memory.least = bound.tried.bytes_per_example
            values = graphs.run(bound, mechanism, probes, wanted, room)
        return measure(bound, mechanism, probes, wanted) if values is None else values

    return run


class Graphs:
    """The captured passes over a model in its current state; those of earlier states are freed.

    Args:
        replica: The model.
        expected_batch: The mean batch size.
        wanted: Whether to capture passes on a GPU.

    Attributes:
        works: False once capturing has failed.
    """

    def __init__(self, replica: Replica, expected_batch: int, *, wanted: bool) -> None:
        self.replica, self.wanted, self.works = replica, wanted, True
        usual = {math.ceil(expected_batch + k * expected_batch**0.5) for k in _DEVIATIONS}
        self._sizes = sorted({*usual, -(-expected_batch // 2)} - {0})
        self._step = max(1, expected_batch // 8)
        self._made_at = replica.changes
        self._forget()
        self._replays = 0
        self._asked: Counter[tuple[Hashable, int]] = Counter()

    def _forget(self) -> None:
        self._captured: dict[tuple[Hashable, int], _Captured] = {}  # by kind and size
        # all graphs share one memory, because they are replayed one after the other
        self._pool: object = None
        self._loaded: set[Hashable] = set()  # kinds whose kernels a warm-up has loaded

    def serve(self, gradients: ExampleGradients) -> bool:
        """Whether passes over such examples are captured.

        Not if buffers are written, because their copies move.
        """
        examples = gradients.examples
        if not self.wanted or examples.z.device.type != "cuda" or self.replica.written:
            return False
        # a graph would not read it again
        if any(tensor.device != examples.z.device for tensor in examples.tensors):
            return False
        if self._made_at != self.replica.changes:
            self._made_at = self.replica.changes
            self._forget()
        return self.works

    def size_for(self, count: int, room: int) -> int:
        """The size that a batch of ``count`` examples, at most ``room``, is padded to.

        Few sizes mean few graphs, which are all captured early. The expected batch b, of Poisson
        draws, gives b/2 and five sizes from b − √b to b + 1.6 √b, which leave 5 % of a pass to
        padding at b = 32 and 3 % at b = 128; a larger batch has a multiple of b/8.
        """
        usual = [size for size in self._sizes if count <= size <= room]
        return usual[0] if usual else min(room, -(-count // self._step) * self._step)

    def begin(self, gradients: ExampleGradients, room: int) -> StartedGraph | None:
        """Replay the forward half of an existing graph for such examples.

        None: there is no such graph.

        Args:
            gradients: The examples, with their masks.
            room: As in :meth:`run`.
        """
        size, own = self.size_for(len(gradients), room), signature(gradients)
        if len(gradients) > room:
            return None
        for (kind, its_size), captured in reversed(self._captured.items()):
            if its_size == size and kind[:2] == (own, self.replica.key):  # type: ignore[index]
                outputs = captured.begin(gradients.examples)
                self._replays += 1
                return None if outputs is None else StartedGraph(captured, self._replays, outputs)
        return None

    def run(
        self, bound: Bound, mechanism: Mechanism, probes: Draws, wanted: Wanted, room: int
    ) -> StepValues | None:
        """The pass over a batch; the next pass overwrites the result.

        None if it cannot be captured, or not yet. A batch that is too large for one graph is run in
        pieces of equal size.

        Args:
            bound: The batch; a half of a graph that the loop has begun is finished.
            mechanism: How gradients are released.
            probes: Of the measurement.
            wanted: What the pass computes.
            room: How many examples a pass can hold in memory.
        """
        count, rest = len(bound.gradients), (mechanism, probes, wanted)
        if count <= room:
            return self._run(bound, *rest, self.size_for(count, room))
        at_once = -(-count // -(-count // room))
        total: StepValues | None = None
        for start in range(0, count, at_once):
            examples = bound.gradients.examples[slice(start, start + at_once)]
            piece = replace(
                bound, gradients=replace(bound.gradients, examples=examples), forward=None
            )
            values = self._run(piece, *rest, self.size_for(at_once, room))
            if values is None:
                return None
            # the next replay overwrites it
            total = values.kept(sums=True) if total is None else joined((total, values))
        return total

    def _run(
        self, bound: Bound, mechanism: Mechanism, probes: Draws, wanted: Wanted, size: int
    ) -> StepValues | None:
        kind = (
            signature(bound.gradients),
            self.replica.key,
            (wanted.kind, len(probes.seeds)),
            mechanism,
        )
        if not self.works or self._comes_too_rarely(kind, size):
            return None

        found, problem = None, ""
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            found = self._captured.pop((kind, size), None)
            if found is None:
                cold = kind not in self._loaded
                found = _Captured(bound, mechanism, probes, wanted, size, self._pool, warm_up=cold)
            self._captured[kind, size] = found  # the latest comes last
            # each value of noise or threshold needs its own graph
            if len(self._captured) > _MOST_GRAPHS:
                del self._captured[next(iter(self._captured))]
        except RuntimeError as error:
            found, problem = None, str(error)
        if found is None:  # outside the handler, because its error holds the pass's tensors
            warmed_up = kind not in self._loaded
            self._forget()  # the graphs' common memory may be damaged
            release_memory()
            if not warmed_up:  # once more, with a warm-up
                return self._run(bound, mechanism, probes, wanted, size)
            logger.warning(
                "the step could not be captured in a CUDA graph and runs eagerly: %s", problem
            )
            self.works = False
            return None
        self._loaded.add(kind)

        # The loop's forward pass is valid only if no other graph has overwritten its results.
        begun = bound.forward
        ready = (
            isinstance(begun, StartedGraph)
            and begun.captured is found
            and begun.replays == self._replays
        )
        self._replays += 1
        return found.replay(bound.gradients.examples, probes, begun=ready)

    def _comes_too_rarely(self, kind: Hashable, size: int) -> bool:
        """Whether another graph is not worth capturing yet: one of many lengths, or for a noise
        that changes.
        """
        if (kind, size) in self._captured or len(self._captured) < _GRAPHS_AT_ONCE:
            return False
        # a noise that changes at each step would need new graphs forever
        if len(self._asked) >= _MOST_ASKED:
            self._asked.clear()
        self._asked[kind, size] += 1
        return self._asked[kind, size] < _USES_BEFORE_CAPTURING


class _Captured:
    """One pass of fixed size as CUDA graphs, with the inputs that it reads: probes' bits and
    batch size.
    """

    def __init__(
        self,
        bound: Bound,
        mechanism: Mechanism,
        probes: Draws,
        wanted: Wanted,
        size: int,
        pool: object,
        *,
        warm_up: bool,
    ) -> None:
        gradients, device = bound.gradients, bound.gradients.device
        # without the loop's forward pass, which would be kept as long as the graph
        self.bound, self.mechanism, self.wanted = replace(bound, forward=None), mechanism, wanted
        self.size = size

        # Inputs that change between replays stay at the addresses that the graph reads.
        self.bits = tuple(
            torch.zeros(gradients.num_parameters, dtype=torch.int8, device=device)
            for _ in probes.seeds
        )
        self.probes = probes
        self.source = torch.Generator(device=device)
        self.places = torch.arange(size, device=device)
        self.count = torch.full((), size, dtype=torch.long, device=device)

        self.captured = CapturedPass(
            gradients, size, self._stages, pool, num_stages=2, warm_up=warm_up
        )

    def begin(self, examples: Examples) -> Any:
        """The model's outputs for these examples, safe from later replays.

        None if some have no rows.
        """
        outputs = self.captured.begin(examples)
        leaves, _ = flattened(outputs)
        if not all(isinstance(leaf, Tensor) and leaf.shape[:1] == (self.size,) for leaf in leaves):
            return None
        return map_tensors(lambda leaf: leaf[: len(examples)].clone(), outputs)

    def replay(self, examples: Examples, probes: Draws, *, begun: bool = False) -> StepValues:
        """The pass over these examples; the next replay overwrites the result.

        Args:
            examples: The examples.
            probes: Their seeds; everything else is built in.
            begun: Whether :meth:`begin` was the last replay, for these examples.
        """
        count = len(examples)
        self.count.fill_(count)
        for bits, seed in zip(self.bits, probes.seeds, strict=True):
            draw_bits(seed, bits, self.source)
        *_, values = self.captured.replay(examples, begun=begun)
        return values.first(count)

    def _stages(self, gradients: ExampleGradients) -> Iterator[Any]:
        """The outputs, then everything."""
        z, measured = gradients.examples.z.detach(), bool(self.probes.seeds)
        gradients = replace(gradients, twice=measured)
        forward = forward_pass(gradients, z.requires_grad_() if measured else z)
        yield map_tensors(Tensor.detach, forward.outputs)

        jacobian = RecordedJacobian(gradients, self.mechanism, forward, measured=measured)
        signs = tuple(signs_of(bits, gradients.dtype) for bits in self.bits)
        counts = (self.places < self.count).to(gradients.dtype)
        bound = replace(self.bound, gradients=gradients, counts=counts)
        probes = replace(self.probes, probes_at_once=1, probes=signs)
        yield values_of(jacobian, bound, self.mechanism, probes, self.wanted)
