"""Which pass serves a batch: a recorded one if a trial shows that it fits, otherwise one mapped over examples.

Passes that run out of memory are discarded and repeated in pieces of half the size.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

import torch

from torchfil.engine.graphs import CapturedPasses, StartedGraph
from torchfil.engine.guard import check_copy
from torchfil.engine.measure import StepValues, Wanted, joined, values_of
from torchfil.engine.replica import Replica
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.estimators import Draws, get_estimator
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.masks import RandomWatch
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import Jacobian
from torchfil.fisher.recording import (
    Plan,
    RecordedForward,
    RecordedJacobian,
    UnsupportedCallError,
    forward_pass,
    plan,
)
from torchfil.fisher.recording.graphs import release_memory
from torchfil.private import Examples
from torchfil.utils.errors import ran_out
from torchfil.utils.trees import form_of, tensors_of

__all__ = ["Executor", "PassMemory", "Started"]

logger = logging.getLogger(__name__)

Passes = Sequence[tuple[int, int]]  # over one batch: examples at once, and bytes per example
Cut = Callable[[int], Passes]  # from a limit in bytes

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
        fitting = self._fitting.setdefault(self._key_without_length(gradients), {})
        if len(fitting) >= _LENGTHS_TO_TRY and min(fitting) < gradients.num_coordinates < max(fitting):
            self._plans[key] = fitting[max(fitting)]  # the one with the most memory
            return self._plans[key]
        constants = self.replica.note_written(gradients.constants)
        found = plan(replace(gradients, constants=constants))
        self.replica.learn_written(constants)
        if not self._recorded_wanted:
            reason = "clipping='per_layer' needs the norm of each parameter's gradient"
            found = Plan(reason, 0, facts=found.facts)
        if len(gradients) > 1:  # one example cannot show whether examples mix
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
                self._fitting.clear()
            self._plans[key] = found
            if found.fits:
                fitting[gradients.num_coordinates] = found
            _log_plan(found, gradients.autocast)
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
        batch = PrivateBatch(replace(gradients, facts=tried.facts), mechanism, tried)

        def cut(limit: int) -> Passes:
            return _passes_within(limit, batch, wanted)

        before = self.memory.limit
        while True:
            try:
                return self._evaluated(batch, tried, wanted, started.take() if started is not None else None, few=few)
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                reason = str(error)
            # only here is the error gone, whose traceback held everything that the pass had allocated
            if not self.memory.halve(cut, reason):
                self.memory.limit = before
                raise torch.OutOfMemoryError(
                    f"the pass over one example ran out of memory ({_shortened(reason)}). Nothing was recorded, and "
                    "the step was not taken. Free memory on that device, track less (track=()), or use fewer probes "
                    "(num_probes=)."
                )

    def _evaluated(
        self,
        batch: PrivateBatch,
        tried: Plan,
        wanted: Wanted,
        forward: RecordedForward | StartedGraph | None,
        *,
        few: bool,
    ) -> StepValues:
        """By a recorded pass as far as one serves; other estimators use their own products with each J."""
        one_pass = get_estimator(wanted.estimator).one_pass and wanted.test_matrix is None
        recorded = wanted if one_pass or not wanted.seeds else replace(wanted, seeds=())
        if not tried.fits or (recorded is not wanted and not wanted.summed):
            return self._mapped(batch, wanted)
        try:
            values = self._recorded(batch, tried, recorded, forward, few=few)
        except UnsupportedCallError as error:  # of a batch that is not as the trial's: from now on, map over such ones
            found = Plan(str(error), 0, facts=tried.facts)
            self._plans[self._key(batch.gradients)] = found
            _log_plan(found, batch.gradients.autocast)
            return self._mapped(batch, wanted)
        if recorded is wanted:
            return values
        measured = self._mapped(batch, replace(wanted, summed=False, questions=()))
        check_copy(measured.norm, values.norm, reduced=batch.gradients.reduced)
        return replace(values, additions={**(values.additions or {}), **(measured.additions or {})})

    def begin_live(self, gradients: ExampleGradients) -> RecordedForward | None:
        """The forward half of a recorded pass of the live model; None if it could not be completed to a whole pass."""
        key, examples = self._key(gradients), gradients.examples
        tried = self._plans.get(key) if len(examples) else None
        if tried is None or not tried.fits or self.replica.written or key in self._not_recorded_live:
            return None
        if self._uses_graphs(examples) or len(examples) > self._room(tried):
            return None
        drawn = RandomWatch(self.replica.device)
        reason = ""
        try:
            return forward_pass(replace(gradients, facts=tried.facts), examples.z.detach().requires_grad_(), once=True)
        except UnsupportedCallError:
            self._not_recorded_live.add(key)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            reason = str(error)
        if reason:
            self.memory.halve(lambda limit: [_recorded_pass_within(limit, len(examples), tried)], reason)
        drawn.rewind()  # the loop then runs a plain pass from the same random numbers
        return None

    def begin_graph(self, gradients: ExampleGradients) -> StartedGraph | None:
        """The forward half of a CUDA graph over the examples, with their masks; None if there is no such graph."""
        tried = self._plans.get(self._key(gradients))
        if tried is None or not tried.fits or not self._uses_graphs(gradients.examples):
            return None
        return self._captured_passes().begin(gradients, self._room(tried), self.replica.key)

    def runs_in_pieces(self, gradients: ExampleGradients) -> bool:
        """Whether a batch is mapped over or cut into chunks, so that the forward pass runs more than once."""
        tried = self.plan(gradients)
        return not tried.fits or len(gradients) > self._room(tried)

    def _recorded(
        self,
        batch: PrivateBatch,
        tried: Plan,
        wanted: Wanted,
        forward: RecordedForward | StartedGraph | None,
        *,
        few: bool,
    ) -> StepValues:
        """By a CUDA graph if the batch fits one, by completing the loop's pass, or by a separate pass."""
        gradients, mechanism, count = batch.gradients, batch.mechanism, len(batch.gradients)
        begun, forward = (forward, None) if isinstance(forward, StartedGraph) else (None, forward)
        if forward is None and self._uses_graphs(gradients.examples):
            room = self._room(tried)
            graphs = self._captured_passes_of_few(count, wanted, room) if few else self._captured_passes()
            values = graphs.run(batch, wanted, room, self.replica.key, begun)
            if values is not None:
                return values

        measured, chunks = bool(wanted.seeds), None
        if forward is not None:
            live = replace(gradients, model=self.replica.live)
            try:
                jacobian = RecordedJacobian(live, mechanism.clip, mechanism.max_grad_norm, forward, measured=measured)
                chunks = [(slice(0, count), jacobian)]
            except UnsupportedCallError:  # the way back to the outputs shows whether it can be used
                self._not_recorded_live.add(self._key(gradients))
        at_once = batch.probes_at_once(len(wanted.seeds), self.memory.limit)
        return _values(batch, chunks or batch.chunks(self.memory.limit, 1, measured=measured), wanted, 1, at_once)

    def _mapped(self, batch: PrivateBatch, wanted: Wanted) -> StepValues:
        """With gradients mapped over examples, in chunks."""
        columns, vectors = batch.working_vectors(wanted.estimator, self.memory.limit)
        batch = replace(batch, plan=None)
        return _values(batch, batch.chunks(self.memory.limit, vectors), wanted, columns)

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
            self._graphs_of_few = CapturedPasses(count, probes_at_once=at_once, varies=False)
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

    def _key(self, gradients: ExampleGradients) -> Hashable:
        return gradients.examples.form, self.replica.key, tuple(gradients.parameters), gradients.autocast

    def _key_without_length(self, gradients: ExampleGradients) -> Hashable:
        """A key that is equal for examples that differ only in length."""
        public = gradients.examples.public
        kinds = tuple((leaf.ndim, leaf.dtype) for leaf in tensors_of(public))
        return kinds, form_of(public), self.replica.key, tuple(gradients.parameters), gradients.autocast


class PassMemory:
    """The bytes that a pass over examples may hold at once; fewer once a pass has run out of memory.

    Guarantees:
        * A pass that ran out of memory leaves nothing behind: no number and no entry in the ledger. Its seeds determine
          its probes, so that the repeated pass gives the same numbers up to rounding.
        * If not even one example fits, the limit stays as it was, and the error says so.

    Args:
        limit: The bytes.

    Attributes:
        limit: The bytes now.

    Example:
        >>> memory = PassMemory(1000)
        >>> memory.room(100), memory.room(4000)
        (10, 1)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._warned = False

    def room(self, bytes_per_example: int) -> int:
        """How many examples a pass may hold at once."""
        return max(1, self.limit // max(1, bytes_per_example))

    def halve(self, cut: Cut, reason: str) -> bool:
        """Let a pass hold half as much; False if it held only one example.

        Args:
            cut: How a limit cuts the batch that ran out of memory.
            reason: The device's message.
        """
        held = cut(self.limit)
        limit = min(self.limit, max(examples * size for examples, size in held)) // 2
        pieces = cut(limit)
        if pieces == held:
            return False
        self.limit = limit
        release_memory()

        # warn the first time: from now on every step takes longer
        was, now = (max(examples for examples, _ in passes) for passes in (held, pieces))
        text = f"a pass over {was} examples ran out of memory ({_shortened(reason)}) and is repeated with {now} at once"
        logger.info(text)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{text}, as later ones will be. The numbers are the same up to rounding; "
                f"Execution(max_memory={limit}) starts with that size.",
                stacklevel=2,
            )
        return True


def _values(
    batch: PrivateBatch,
    chunks: Iterable[tuple[slice, Jacobian]],
    wanted: Wanted,
    columns: int,
    probes_at_once: int = 1,
) -> StepValues:
    """The wanted values, chunk by chunk."""
    parts = []
    for rows, jacobian in chunks:
        draws = Draws(wanted.seeds, rows, len(batch.gradients), columns, probes_at_once)
        parts.append(values_of(batch, jacobian, wanted, draws, wanted.rate))
    return joined(parts)


def _passes_within(limit: int, batch: PrivateBatch, wanted: Wanted) -> Passes:
    """The passes over a batch within this many bytes: recorded, mapped over examples, or one of each."""
    gradients, passes = batch.gradients, []
    if batch.plan is not None and batch.plan.fits:
        passes.append(_recorded_pass_within(limit, len(gradients), batch.plan))
    if not passes or not get_estimator(wanted.estimator).one_pass or wanted.test_matrix is not None:
        vectors = batch.working_vectors(wanted.estimator, limit)[1]
        size = vectors * gradients.num_parameters * gradients.dtype.itemsize
        passes.append((min(len(gradients), max(1, limit // size)), size))
    return passes


def _recorded_pass_within(limit: int, count: int, tried: Plan) -> tuple[int, int]:
    """How many of ``count`` examples a recorded pass holds at once within this many bytes, and the bytes of one."""
    size = max(1, tried.bytes_per_example)
    return min(count, max(1, limit // size)), size


def _shortened(reason: str) -> str:
    return reason.partition("\n")[0][:200]


def _log_plan(tried: Plan, autocast: torch.dtype | None) -> None:
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
