"""Which pass serves a batch: a recorded one if a trial shows that it fits, otherwise one mapped over examples."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from torchfil.engine.graphs import BUCKETS, CapturedPasses, StartedGraph
from torchfil.engine.guard import check_copy
from torchfil.engine.measure import StepValues, Wanted, joined, values_of
from torchfil.engine.memory import PassMemory, is_recorded, passes_within, recorded_pass_within
from torchfil.engine.replica import Replica
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.draws import Draws
from torchfil.fisher.estimators import get_estimator
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.masks import RandomWatch
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.recording import (
    Plan,
    RecordedForward,
    RecordedJacobian,
    ReleasedGradients,
    UnsupportedCallError,
    forward_pass,
    plan,
    run_alike,
)
from torchfil.private import Examples
from torchfil.utils.errors import ran_out
from torchfil.utils.trees import form_of, tensors_of

__all__ = ["Executor", "Started"]

logger = logging.getLogger(__name__)

_MOST_PLANS = 256
_LENGTHS_TO_TRY = 4  # of texts of which others lie between


class Started:
    """The loop's forward pass, to be completed once: a second attempt must not keep its tensors in memory."""

    def __init__(self, half: RecordedForward | StartedGraph | None) -> None:
        self._half = half

    def take(self) -> RecordedForward | StartedGraph | None:
        """The pass; None from the second call on."""
        half, self._half = self._half, None
        return half


class Executor:
    """Computes what a step needs from a batch: losses, norms, clipped sums, Fisher information.

    Args:
        replica: The model.
        expected_batch: The mean batch size.
        max_memory: For temporary tensors, in bytes.
        cuda_graphs: Whether to capture recorded passes on a GPU.
        recorded: Whether recorded passes may be used; not if each parameter's gradient is clipped separately.
    """

    def __init__(
        self,
        replica: Replica,
        expected_batch: int,
        max_memory: int,
        *,
        cuda_graphs: bool,
        recorded: bool = True,
    ) -> None:
        self.replica = replica
        self.memory = PassMemory(max_memory)
        self._expected_batch = expected_batch
        self._graphs_wanted, self._recorded_wanted = cuda_graphs, recorded
        self._graphs: CapturedPasses | None = None
        self._graphs_of_few: CapturedPasses | None = None  # separate memory: both results are in use together
        self._graphs_made_at = replica.changes
        self._plans: dict[Hashable, Plan] = {}
        self._fitting: dict[Hashable, dict[int, Plan]] = {}  # by all except lengths, then by coordinates
        self._not_recorded_live: set[Hashable] = set()

    def knows(self, gradients: ExampleGradients) -> bool:
        """Whether such examples were tried before."""
        return self._key(gradients) in self._plans

    def plan(self, gradients: ExampleGradients) -> Plan:
        """Whether a recorded pass fits the model; tried once for every shape of examples.

        Texts come in many lengths: a length between two that were tried needs no separate trial.
        """
        key = self._key(gradients)
        if key in self._plans or not len(gradients):
            return self._plans.get(key, Plan(None, 1))
        fitting = self._fitting.setdefault(self._kin(gradients), {})
        if len(fitting) >= _LENGTHS_TO_TRY and min(fitting) < gradients.num_coordinates < max(fitting):
            self._plans[key] = fitting[max(fitting)]  # the one with the most memory
            return self._plans[key]
        constants = self.replica.note_written(gradients.constants)
        found = plan(replace(gradients, constants=constants))
        self.replica.learn_written(constants)
        if not self._recorded_wanted:
            found = Plan("clipping='per_layer' needs the norm of each parameter's gradient", 0)
        if len(gradients) > 1:  # one example cannot show whether examples mix
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
                self._fitting.clear()
            self._plans[key] = found
            if found.fits:
                fitting[gradients.num_coordinates] = found
            _tell(found, gradients.autocast)
        return found

    def run(
        self,
        gradients: ExampleGradients,
        mechanism: Mechanism,
        wanted: Wanted,
        started: Started | None = None,
        *,
        few: bool = False,
    ) -> StepValues:
        """The wanted values for a batch of at least one example; the next pass may overwrite them.

        If a pass runs out of memory, it is repeated with half as many examples at once.

        Args:
            gradients: The examples with their model.
            mechanism: How their gradients are released.
            wanted: What to compute.
            started: The loop's own forward pass over these examples, which is used up.
            few: Whether these are a fixed number of examples from the batch that was run just before.

        Raises:
            torch.OutOfMemoryError: Not even one example fits.
        """
        tried = self.plan(gradients)
        if wanted.questions:  # an alternative has a pass in addition to the examples' own
            tried = replace(tried, bytes_per_example=2 * tried.bytes_per_example)
        batch = PrivateBatch(gradients, mechanism, tried)

        def attempt() -> StepValues:
            return self._evaluated(batch, wanted, started.take() if started is not None else None, few=few)

        return self.memory.repeated(attempt, lambda limit: passes_within(limit, batch, wanted))

    def _evaluated(
        self, batch: PrivateBatch, wanted: Wanted, forward: RecordedForward | StartedGraph | None, *, few: bool
    ) -> StepValues:
        if not is_recorded(batch):
            return self._mapped(batch, wanted)
        one_pass = get_estimator(wanted.estimator).one_pass and wanted.test_matrix is None
        recorded = wanted if one_pass or not wanted.seeds else replace(wanted, seeds=())
        if recorded is not wanted and not wanted.summed:
            return self._mapped(batch, wanted)
        try:
            values = self._recorded(batch, recorded, forward, few=few)
        except UnsupportedCallError as error:  # of a batch that is not as the trial's
            return self._mapped(replace(batch, plan=self._give_up(batch.gradients, str(error))), wanted)

        # Other estimators use their own products with each example's Jacobian.
        if recorded is not wanted:
            measured = self._mapped(batch, replace(wanted, summed=False, questions=()))
            check_copy(measured.norm, values.norm, reduced=batch.gradients.reduced)
            return replace(values, additions={**(values.additions or {}), **(measured.additions or {})})
        return values

    def begin_live(self, gradients: ExampleGradients) -> RecordedForward | None:
        """The forward half of a recorded pass of the live model; None if it could not be completed to a whole pass."""
        key, examples = self._key(gradients), gradients.examples
        tried = self._plans.get(key) if len(examples) else None
        if tried is None or not tried.fits or self.replica.written or key in self._not_recorded_live:
            return None
        if self._uses_graphs(examples) or len(examples) > self._room(tried):
            return None
        run_alike(self.replica.live, self.replica.template)
        drawn = RandomWatch(self.replica.device)
        reason = ""
        try:
            return forward_pass(gradients, examples.z.detach().requires_grad_(), once=True)
        except UnsupportedCallError:
            self._not_recorded_live.add(key)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            reason = str(error)
        if reason:
            self.memory.halve(lambda limit: [recorded_pass_within(limit, len(examples), tried)], reason)
        drawn.rewind()  # the loop then runs a plain pass from the same random numbers
        return None

    def begin_graph(self, gradients: ExampleGradients) -> StartedGraph | None:
        """The forward half of a CUDA graph over the examples, with their masks; None if there is no such graph."""
        tried = self._plans.get(self._key(gradients))
        if tried is None or not tried.fits or not self._uses_graphs(gradients.examples):
            return None
        graphs, room = self._captured_passes(), self._room(tried)
        fits = len(gradients) + graphs.bucket(room) <= room
        return graphs.begin(gradients, room, self.replica.key) if fits else None

    def runs_in_pieces(self, gradients: ExampleGradients) -> bool:
        """Whether a batch is mapped over or cut into chunks, so that the forward pass runs more than once."""
        tried = self.plan(gradients)
        return not tried.fits or len(gradients) > self._room(tried)

    def _recorded(
        self, batch: PrivateBatch, wanted: Wanted, forward: RecordedForward | StartedGraph | None, *, few: bool
    ) -> StepValues:
        """By a CUDA graph if the batch fits one, by completing the loop's pass, or by a separate pass."""
        assert batch.plan is not None
        gradients, mechanism = batch.gradients, batch.mechanism
        room, count = self._room(batch.plan), len(batch.gradients)
        begun, forward = (forward, None) if isinstance(forward, StartedGraph) else (None, forward)
        if forward is None and self._uses_graphs(gradients.examples):
            graphs = self._captured_passes_of_few(count, wanted, room) if few else self._captured_passes()
            if graphs.works and count + graphs.bucket(room) <= room:
                values = graphs.run(batch, wanted, room, self.replica.key, begun)
            else:
                values = self._captured_in_pieces(graphs, batch, wanted, room)
            if values is not None:
                return values

        parts: list[StepValues] = []
        at_once = batch.probes_at_once(len(wanted.seeds), self.memory.limit)
        chunks: Any = batch.chunks(self.memory.limit, 1, one_pass=True, measured=bool(wanted.seeds))
        if forward is not None:
            live = replace(gradients, model=self.replica.live)
            kind = RecordedJacobian if wanted.seeds else ReleasedGradients
            jacobian = kind(live, mechanism.clip, mechanism.max_grad_norm, forward)
            try:
                jacobian.output_gradients  # noqa: B018 - the way back to the outputs shows whether it can be used
                chunks = [(slice(0, count), jacobian)]
            except UnsupportedCallError:
                self._not_recorded_live.add(self._key(gradients))
        for rows, jacobian in chunks:
            draws = Draws(wanted.seeds, rows, count, 1, at_once)
            parts.append(values_of(batch, jacobian, wanted, draws, wanted.rate))
        return joined(parts)

    def _captured_in_pieces(
        self, graphs: CapturedPasses, batch: PrivateBatch, wanted: Wanted, room: int
    ) -> StepValues | None:
        """A batch that is too large for one graph, in pieces of equal size; None if capturing does not work."""
        count = len(batch.gradients)
        largest = room // graphs.bucket(room) * graphs.bucket(room)
        if not graphs.works or largest == 0:
            return None
        size = -(-count // -(-count // largest))
        parts = []
        for start in range(0, count, size):
            examples = batch.gradients.examples[slice(start, start + size)]
            piece = replace(batch, gradients=replace(batch.gradients, examples=examples))
            values = graphs.run(piece, wanted, room, self.replica.key)
            if values is None:
                return None
            parts.append(values.kept(sums=True))  # the next replay overwrites them
        return joined(parts)

    def _mapped(self, batch: PrivateBatch, wanted: Wanted) -> StepValues:
        """With gradients mapped over examples, in chunks."""
        columns, vectors = batch.working_vectors(wanted.estimator, self.memory.limit)
        parts = []
        for rows, jacobian in batch.chunks(self.memory.limit, vectors):
            draws = Draws(wanted.seeds, rows, len(batch.gradients), columns)
            parts.append(values_of(batch, jacobian, wanted, draws, wanted.rate))
        return joined(parts)

    def _captured_passes(self) -> CapturedPasses:
        """The graphs for the model's current state; graphs for earlier states are freed."""
        if self._graphs is None or self._graphs_made_at != self.replica.changes:
            works = self._graphs is None or self._graphs.works
            self._graphs = CapturedPasses(self._expected_batch)
            self._graphs.works, self._graphs_made_at = works, self.replica.changes
            self._graphs_of_few = None
        return self._graphs

    def _captured_passes_of_few(self, count: int, wanted: Wanted, room: int) -> CapturedPasses:
        """Graphs over this many examples, which keep a GPU busy only if all probes are processed at once."""
        if self._graphs_of_few is None:
            at_once = max(1, min(len(wanted.seeds), room // max(1, count)))
            self._graphs_of_few = CapturedPasses(BUCKETS * count, probes_at_once=at_once)
        return self._graphs_of_few

    def _uses_graphs(self, examples: Examples) -> bool:
        """Whether passes over such examples are captured; not if buffers are written, because their copies move."""
        if not self._graphs_wanted or examples.z.device.type != "cuda" or self.replica.written:
            return False
        if any(tensor.device != examples.z.device for tensor in examples.tensors):  # a graph would not read it again
            return False
        return self._captured_passes().works

    def _room(self, tried: Plan) -> int:
        """How many examples a pass may hold at once."""
        return self.memory.room(tried.bytes_per_example)

    def _give_up(self, gradients: ExampleGradients, reason: str) -> Plan:
        """From now on, map over such examples."""
        self._plans[self._key(gradients)] = found = Plan(reason, 0)
        _tell(found, gradients.autocast)
        return found

    def _key(self, gradients: ExampleGradients) -> Hashable:
        return gradients.examples.form, self.replica.key, tuple(gradients.parameters), gradients.autocast

    def _kin(self, gradients: ExampleGradients) -> Hashable:
        """A key that is equal for examples that differ only in length."""
        public = gradients.examples.public
        kinds = tuple((leaf.ndim, leaf.dtype) for leaf in tensors_of(public))
        return kinds, form_of(public), self.replica.key, tuple(gradients.parameters), gradients.autocast


def _tell(tried: Plan, autocast: torch.dtype | None) -> None:
    if tried.reason is not None and autocast is not None:
        logger.warning("gradients mapped over examples are computed without autocast (torch.func does not support it)")
    if tried.reason is not None:
        logger.warning("gradients are mapped over examples (vmap), which is slower: %s", tried.reason)
    elif tried.generic:
        logger.info(
            "no layer rule for %s: their gradients are formed example by example, which is slower (CONTRIBUTING.md "
            "shows how to add one)",
            ", ".join(tried.generic),
        )
