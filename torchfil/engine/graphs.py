"""The recorded pass as CUDA graphs: which graph serves a batch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchfil.engine.measure import StepValues, Wanted, values_of
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.draws import GivenDraws, draw_bits, signs_of
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.recording import RecordedJacobian, ReleasedGradients
from torchfil.fisher.recording.graphs import CapturedPass, release_memory, signature
from torchfil.private import Examples
from torchfil.utils.trees import flattened, map_tensors

__all__ = ["BUCKETS", "CapturedPasses", "StartedGraph"]

logger = logging.getLogger(__name__)

_MOST_GRAPHS = 48
_GRAPHS_AT_ONCE = 16  # graphs that are captured at their first use
_USES_BEFORE_CAPTURING = 3  # of further ones
_MOST_ASKED = 256
BUCKETS = 8  # graphs' batch sizes are multiples of an eighth of the expected batch


class CapturedPasses:
    """Runs batches through recorded passes that are CUDA graphs.

    A graph needs fixed shapes: a batch is padded with copies of its first example to the next multiple of an eighth of
    the expected batch (:meth:`bucket`), and the copies are masked out of the sum.

    Args:
        expected_batch: The mean batch size.
        probes_at_once: How many probes to process together.

    Attributes:
        works: False once capturing has failed.
    """

    def __init__(self, expected_batch: int, *, probes_at_once: int = 1) -> None:
        self._expected_batch = expected_batch
        self.probes_at_once = probes_at_once
        self.works = True
        self._captured: dict[tuple[Hashable, int], _Captured] = {}  # by kind and size
        self._pool: Any = None  # all graphs share one memory, because they are replayed one after the other
        self._replays = 0
        self._asked: Counter[tuple[Hashable, int]] = Counter()

    def bucket(self, room: int) -> int:
        """Batches are padded to a multiple of this number, if the memory holds that many examples.

        Padding costs little if examples are small, and fewer sizes mean fewer graphs; but a copy of a long text costs
        as much as the text.
        """
        return max(-(-self._expected_batch // BUCKETS), min(8, room // 4), 1)

    def begin(self, gradients: ExampleGradients, room: int, mode: Hashable) -> StartedGraph | None:
        """Replay the forward half of an existing graph for such examples; None: there is no such graph.

        Args:
            gradients: The examples, with their masks.
            room: As in :meth:`run`.
            mode: As in :meth:`run`.
        """
        bucket = self.bucket(room)
        size = -(-len(gradients) // bucket) * bucket
        own = signature(gradients)
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

        Args:
            batch: At least one example.
            wanted: What the pass computes.
            room: How many examples a pass can hold in memory.
            mode: The state of the model that is built into the pass; a graph serves one state.
            begun: The result of :meth:`begin` for these examples, if it was called.
        """
        gradients = batch.gradients
        bucket = self.bucket(room)
        size = -(-len(gradients) // bucket) * bucket
        kind = (signature(gradients), mode, wanted.kind, batch.mechanism)
        if self._comes_too_rarely(kind, size):
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
        return captured.replay(gradients.examples, wanted, begun=ready)

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
        mechanism = self.batch.mechanism
        kind = RecordedJacobian if self.wanted.seeds else ReleasedGradients
        jacobian = kind(gradients, mechanism.clip, mechanism.max_grad_norm)
        yield jacobian.outputs

        probes = tuple(signs_of(bits, gradients.dtype) for bits in self.bits)
        draws = GivenDraws(self.wanted.seeds, slice(0, self.size), self.size, 1, self.probes_at_once, probes)
        mask = (self.places < self.count).to(gradients.dtype)
        yield values_of(replace(self.batch, gradients=gradients), jacobian, self.wanted, draws, self.rate, mask)
