"""What a pass over a batch should compute, and which pass serves it.

It is a recorded one if a trial shows that it fits, otherwise one mapped over examples. On a GPU,
recorded passes are CUDA graphs. Passes that run out of memory are repeated in pieces of half the
size.
"""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.quantities import Track, columns_of, needs_of, question_column
from torchfil.accounting.sums import Column
from torchfil.engine.forward import StartedGraph
from torchfil.engine.guard import check_copy
from torchfil.engine.replica import Replica
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.estimators import EXACT, Draws, draw_bits, signs_of
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
from torchfil.fisher.recording.graphs import CapturedPass, release_memory, signature
from torchfil.private import Examples
from torchfil.utils.errors import ran_out
from torchfil.utils.trees import concatenated, flattened, form_of, map_tensors, tensors_of

logger = logging.getLogger(__name__)

Passes = Sequence[tuple[int, int]]  # over one batch: examples at once, and bytes per example
# by question: the alternative of each answer; None: absent
Places = tuple[tuple[str, tuple[int | None, ...]], ...]
Half = RecordedForward | StartedGraph | None  # a forward pass that the loop has run

_MOST_PLANS = 256
_LENGTHS_TO_TRY = 4  # of texts of which others lie between
_MOST_GRAPHS = 48
_GRAPHS_AT_ONCE = 16  # graphs that are captured at their first use
_USES_BEFORE_CAPTURING = 3  # of further ones
_MOST_ASKED = 256
_ROWS_TO_TRY = 64  # of an owner
_MORE_WHEN_MAPPED = 4  # times the memory of a recorded pass
# of a Poisson draw's size from its mean, in standard deviations
_DEVIATIONS = (-1, -0.4, 0.2, 0.8, 1.6)


@dataclass(frozen=True)
class StepValues:
    """The results of one pass over a batch.

    Attributes:
        losses: ℓ, [batch]; None if Opacus's gradients are released unmeasured.
        norm: ‖g‖ before clipping, [batch].
        clipped_norm: ‖g̃‖, [batch].
        sums: Σ_i g̃_i by parameter name; empty if not wanted.
        columns: What the ledger sums, by the names of quantities and questions; None if the step is
            not measured.
        output_gradients: ∂ℓ_i/∂output_i, for every tensor of the model's output; None if the pass
            has none.
    """

    losses: Tensor | None
    norm: Tensor
    clipped_norm: Tensor
    sums: dict[str, Tensor]
    columns: dict[str, Column] | None
    output_gradients: tuple[Tensor, ...] | None = None

    def kept(self, *, sums: bool) -> StepValues:
        """A copy that later passes do not overwrite; ``sums`` says whether the sums are copied,
        too.
        """
        copied = map_tensors(Tensor.clone, {**vars(self), "sums": self.sums if sums else None})
        return StepValues(**copied if sums else {**copied, "sums": self.sums})

    def first(self, count: int) -> StepValues:
        """The values of the first examples, this many; the sums stay as they are."""
        cut = map_tensors(lambda value: value[:count], {**vars(self), "sums": None})
        return StepValues(**{**cut, "sums": self.sums})


@dataclass(frozen=True)
class Wanted:
    """What a pass should compute.

    Attributes:
        track: The quantities that are tracked besides the trace.
        estimator: The name of the estimator.
        seeds: The seeds of the probes; none: the step is not measured.
        summed: Whether the clipped sum is wanted.
        questions: For each question, which of the examples' alternatives
            (:func:`with_alternatives`) are its answers.
    """

    track: tuple[Track, ...]
    estimator: str
    seeds: tuple[int, ...]
    summed: bool = True
    questions: Places = ()

    @property
    def kind(self) -> Hashable:
        """Everything that a captured pass depends on."""
        return (
            self.track,
            self.estimator,
            len(self.seeds),
            self.summed,
            self.questions,
        )


class Executor:
    """Computes what a step needs from a batch: losses, norms, clipped sums, Fisher information.

    Args:
        replica: The model.
        expected_batch: The mean batch size.
        max_memory: For temporary tensors, in bytes.
        cuda_graphs: Whether to capture recorded passes on a GPU.
        recorded: Whether recorded passes may be used; not if each parameter's gradient is clipped
            separately.
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
        # bytes that a pass may hold; fewer once a pass has run out of memory
        self.memory_limit = max_memory
        self._warned = False
        self._expected_batch = expected_batch
        self._graphs_wanted, self._recorded_wanted = cuda_graphs, recorded
        self._graphs: CapturedPasses | None = None
        # separate memory: both results are in use together
        self._graphs_made_at = replica.changes
        self._plans: dict[Hashable, Plan] = {}
        # by all except lengths, then by coordinates
        self._fitting: dict[Hashable, dict[int, Plan]] = {}
        self._not_recorded_live: set[Hashable] = set()

    def known(self, gradients: ExampleGradients) -> Plan | None:
        """The plan of such examples; None: not tried yet."""
        found = self._plans.get(self._key(gradients))
        return None if found is None else _of_rows(found, gradients.examples.num_rows)

    def plan(self, gradients: ExampleGradients) -> Plan:
        """Whether a recorded pass fits the model; tried once for every shape of examples.

        Texts come in many lengths: a length between two that were tried needs no separate trial.
        """
        key, rows = self._key(gradients), gradients.examples.num_rows
        if key in self._plans:
            return _of_rows(self._plans[key], rows)
        public = gradients.examples.public
        # equal if only lengths differ
        kinds = tuple((leaf.ndim, leaf.dtype) for leaf in tensors_of(public))
        fitting = self._fitting.setdefault((kinds, form_of(public), *key[1:]), {})
        if len(fitting) >= _LENGTHS_TO_TRY and min(
            fitting
        ) < gradients.num_coordinates // rows < max(fitting):
            self._plans[key] = fitting[max(fitting)]  # the one with the most memory
            return _of_rows(self._plans[key], rows)

        # the trial, whose memory is kept by row
        # so many show how the rest behaves
        if rows > _ROWS_TO_TRY and not gradients.examples.masks:
            gradients = replace(
                gradients, examples=next(gradients.examples.by_place.in_rows(_ROWS_TO_TRY))
            )
        tried = gradients.examples.num_rows
        # with copies of buffers, which show what a pass writes into
        constants = gradients.own_constants()
        found = plan(replace(gradients, constants=constants))
        self.replica.learn_written(constants)
        if not self._recorded_wanted:
            found = Plan(
                "clipping='per_layer' needs the norm of each parameter's gradient",
                0,
                facts=found.facts,
            )
        found = replace(found, bytes_per_example=-(-found.bytes_per_example // tried))
        if len(gradients) > 1:  # one example cannot show whether examples mix
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
                self._fitting.clear()
            self._plans[key] = found
            if found.fits:
                fitting[gradients.num_coordinates // tried] = found
            _log_plan(found, gradients.autocast)
        return _of_rows(found, rows)

    def run(
        self,
        gradients: ExampleGradients,
        tried: Plan,
        mechanism: Mechanism,
        wanted: Wanted,
        forward: Half = None,
    ) -> StepValues:
        """The wanted values for a batch of at least one example; the next pass may overwrite them.

        If a pass runs out of memory, it is repeated with half as many examples at once. It leaves
        nothing behind: no number and no entry in the ledger. Its seeds determine its probes, so the
        numbers are the same up to rounding.

        Args:
            gradients: The examples with their model.
            tried: The plan of such examples.
            mechanism: How their gradients are released.
            wanted: What to compute.
            forward: The loop's own forward pass over these examples, which is used up.

        Raises:
            torch.OutOfMemoryError: Not even one example fits; the limit stays as it was.
        """
        rows = gradients.examples.num_rows
        if self._exceeds(gradients.examples, tried):
            at_once = max(
                1, self.memory_limit // (_MORE_WHEN_MAPPED * (tried.bytes_per_example // rows))
            )
            gradients = replace(
                gradients, examples=gradients.examples.by_place, rows_at_once=at_once
            )
            tried, forward = (
                Plan("an owner's rows do not fit into memory together", 0, facts=tried.facts),
                None,
            )
        if wanted.questions:  # an alternative has a pass in addition to the examples' own
            tried = replace(tried, bytes_per_example=2 * tried.bytes_per_example)
        batch, before = (
            PrivateBatch(replace(gradients, facts=tried.facts), mechanism, tried),
            self.memory_limit,
        )
        while True:
            try:
                return self._evaluated(batch, tried, wanted, forward)
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                reason = str(error)
            forward = None  # a second attempt must not keep its tensors in memory
            # only here is the error gone, whose traceback held everything that the pass had
            # allocated
            if not self._halve_memory(batch, wanted, reason):
                self.memory_limit = before
                raise torch.OutOfMemoryError(
                    f"the pass over one example ran out of memory ({_shortened(reason)}). This "
                    "step was not taken: track less (track=()), or use fewer probes "
                    "(num_probes=)."
                )

    def _halve_memory(self, batch: PrivateBatch, wanted: Wanted, reason: str) -> bool:
        """Let a pass hold half as much as the one that ran out of memory.

        False if it held only one example.
        """
        held = _passes_within(self.memory_limit, batch, wanted)
        limit = min(self.memory_limit, max(examples * size for examples, size in held)) // 2
        pieces = _passes_within(limit, batch, wanted)
        if pieces == held:
            return False
        self.memory_limit = limit
        release_memory()

        # warn the first time: from now on every step takes longer
        was, now = (max(examples for examples, _ in passes) for passes in (held, pieces))
        if not self._warned:
            self._warned = True
            what = (
                f"a pass over {was} examples ran out of memory ({_shortened(reason)}), and is "
                f"repeated with {now}"
            )
            warnings.warn(
                f"{what}, with the same numbers; start with Execution(max_memory={limit})",
                stacklevel=2,
            )
        return True

    def _evaluated(
        self, batch: PrivateBatch, tried: Plan, wanted: Wanted, forward: Half
    ) -> StepValues:
        """By a recorded pass as far as one serves.

        Other estimators use their own products with each J.
        """
        one_pass = wanted.estimator != EXACT
        recorded = wanted if one_pass or not wanted.seeds else replace(wanted, seeds=())
        if tried.reason is not None or (recorded is not wanted and not wanted.summed):
            return self._mapped(batch, wanted)
        try:
            values = self._from_graph(batch, tried, recorded, forward)
            if values is None:
                chunks = self._recorded_chunks(batch, forward, measured=bool(recorded.seeds))
                seeds = recorded.seeds
                draws = Draws(seeds, 1, batch.probes_at_once(len(seeds), self.memory_limit))
                values = values_of(batch, chunks, recorded, draws)
        except UnsupportedCallError as error:
            # of a batch that is not as the trial's: from now on, map over such ones
            found = Plan(str(error), 0, facts=tried.facts)
            self._plans[self._key(batch.gradients)] = found
            _log_plan(found, batch.gradients.autocast)
            return self._mapped(batch, wanted)
        if recorded is wanted:
            return values
        measured = self._mapped(batch, replace(wanted, summed=False, questions=()))
        check_copy(measured.norm, values.norm, reduced=batch.gradients.reduced)
        return replace(values, columns={**(values.columns or {}), **(measured.columns or {})})

    def _from_graph(
        self, batch: PrivateBatch, tried: Plan, wanted: Wanted, forward: Half
    ) -> StepValues | None:
        """By a CUDA graph; None if there is none for the batch, or if the loop's own pass has to be
        completed.
        """
        if isinstance(forward, RecordedForward) or not self._uses_graphs(batch.gradients.examples):
            return None
        room, graphs = self._room(tried), self._captured_passes()
        return graphs.run(batch, wanted, room, self.replica.key, forward)

    def _recorded_chunks(
        self, batch: PrivateBatch, forward: Half, *, measured: bool
    ) -> Iterable[tuple[slice, Jacobian]]:
        """The batch as recorded Jacobians: the loop's own forward pass completed, one pass over
        all, or pieces.
        """
        gradients = batch.gradients
        if isinstance(forward, RecordedForward):
            live = replace(gradients, model=self.replica.live)
            try:
                jacobian = RecordedJacobian(live, batch.mechanism, forward, measured=measured)
                return [(slice(0, len(gradients)), jacobian)]
            except UnsupportedCallError:  # the way back to the outputs shows whether it can be used
                self._not_recorded_live.add(self._key(gradients))
        return batch.chunks(self.memory_limit, 1, measured=measured)

    def _mapped(self, batch: PrivateBatch, wanted: Wanted) -> StepValues:
        """With gradients mapped over examples, in chunks."""
        columns, vectors = batch.working_vectors(wanted.estimator, self.memory_limit)
        batch, draws = replace(batch, plan=None), Draws(wanted.seeds, columns)
        return values_of(batch, batch.chunks(self.memory_limit, vectors), wanted, draws)

    def begin_live(self, gradients: ExampleGradients) -> RecordedForward | None:
        """The forward half of a recorded pass of the live model.

        None if it could not be completed to a whole pass.
        """
        key, examples = self._key(gradients), gradients.examples
        tried = self.known(gradients) if len(examples) else None
        if (
            tried is None
            or tried.reason is not None
            or self.replica.written
            or key in self._not_recorded_live
        ):
            return None
        if (
            self._uses_graphs(examples)
            or len(examples) > self._room(tried)
            or self._exceeds(examples, tried)
        ):
            return None
        drawn = RandomWatch(self.replica.device)
        try:
            return forward_pass(
                replace(gradients, facts=tried.facts),
                examples.z.detach().requires_grad_(),
                once=True,
            )
        except UnsupportedCallError:
            self._not_recorded_live.add(key)
        except RuntimeError as error:
            if not ran_out(error):  # otherwise the step's own pass finds out how many examples fit
                raise
        drawn.rewind()  # the loop then runs a plain pass from the same random numbers
        return None

    def begin_graph(self, gradients: ExampleGradients) -> StartedGraph | None:
        """The forward half of a CUDA graph over the examples, with their masks.

        None if there is no such graph.
        """
        tried, examples = self.known(gradients) if len(gradients) else None, gradients.examples
        if (
            tried is None
            or not tried.fits
            or not self._uses_graphs(examples)
            or self._exceeds(examples, tried)
        ):
            return None
        return self._captured_passes().begin(gradients, self._room(tried), self.replica.key)

    def runs_in_pieces(self, count: int, tried: Plan) -> bool:
        """Whether a batch is mapped over or cut into chunks, so that the forward pass runs more
        than once.
        """
        return not tried.fits or count > self._room(tried)

    def _captured_passes(self) -> CapturedPasses:
        """The graphs for the model's current state; graphs for earlier states are freed."""
        if self._graphs is None or self._graphs_made_at != self.replica.changes:
            works = self._graphs is None or self._graphs.works
            self._graphs = CapturedPasses(self._expected_batch)
            self._graphs.works, self._graphs_made_at = works, self.replica.changes
        return self._graphs

    def _uses_graphs(self, examples: Examples) -> bool:
        """Whether passes over such examples are captured.

        Not if buffers are written, because their copies move.
        """
        if not self._graphs_wanted or examples.z.device.type != "cuda" or self.replica.written:
            return False
        # a graph would not read it again
        if any(tensor.device != examples.z.device for tensor in examples.tensors):
            return False
        return self._captured_passes().works

    def _room(self, tried: Plan) -> int:
        """How many examples a pass may hold at once."""
        return max(1, self.memory_limit // max(1, tried.bytes_per_example))

    def _exceeds(self, examples: Examples, tried: Plan) -> bool:
        """Whether the rows of one owner do not fit together.

        Masks cannot be cut, so they are not asked to.
        """
        return (
            examples.num_rows > 1
            and tried.bytes_per_example > self.memory_limit
            and not examples.masks
        )

    def _key(self, gradients: ExampleGradients) -> tuple[Hashable, ...]:
        return (
            gradients.examples.kind,
            self.replica.key,
            tuple(gradients.parameters),
            gradients.autocast,
        )


def _of_rows(found: Plan, rows: int) -> Plan:
    """The plan of examples with this many rows, from that of a row."""
    return found if rows == 1 else replace(found, bytes_per_example=rows * found.bytes_per_example)


def values_of(
    batch: PrivateBatch,
    chunks: Iterable[tuple[slice, Jacobian]],
    wanted: Wanted,
    draws: Draws,
    mask: Tensor | None = None,
) -> StepValues:
    """The wanted values, chunk by chunk; ``mask`` (1 or 0, [batch]) says which examples count in
    the sum.
    """
    needs = needs_of(wanted.track)

    def of_chunk(rows: slice, jacobian: Jacobian) -> StepValues:
        columns: dict[str, Column] | None = None
        if wanted.seeds:
            found = batch.measured(
                jacobian, needs.quantities, wanted.estimator, draws, needs.susceptibility
            )
            columns = columns_of(found, wanted.track)
        if wanted.questions:
            columns = (columns or {}) | _divergences(batch, jacobian, wanted)
        sums = jacobian.clipped_sum(mask) if wanted.summed else {}
        norms = jacobian.norm, jacobian.clipped_norm
        return StepValues(jacobian.losses, *norms, sums, columns, jacobian.output_gradients)

    # a loop would keep each Jacobian until the next is made
    return joined(itertools.starmap(of_chunk, chunks))


def _divergences(batch: PrivateBatch, jacobian: Jacobian, wanted: Wanted) -> dict[str, Column]:
    """The questions' columns, KL_t of each answer, [batch, m]; for "absent", the gradients' norms
    are enough.
    """
    examples, mechanism = jacobian.gradients.examples, batch.mechanism
    # the copy, whose passes nobody counts
    gradients = replace(jacobian.gradients, model=batch.gradients.model)

    weights = examples.clip_weights
    by_alternative = [
        jacobian.products_with(replace(gradients, examples=other))
        for other in examples.alternatives
    ]
    columns: dict[str, Column] = {}
    for name, places in wanted.questions:
        products = [jacobian.products_alone() if k is None else by_alternative[k] for k in places]
        by_answer = [mechanism.divergence(each, weights) for each in products]
        columns[question_column(name)] = {"value": torch.stack(by_answer, dim=1)}
    return columns


def joined(parts: Iterable[StepValues]) -> StepValues:
    """Several passes as one: their examples concatenated, their sums added as they come."""
    first: dict[str, Tensor] = {}  # may share memory with other tensors
    total: dict[str, Tensor] = {}

    def take(part: StepValues) -> StepValues:
        for name, value in part.sums.items():
            if name in total:
                total[name] += value
            elif name in first:
                total[name] = first.pop(name) + value
            else:
                first[name] = value
        return replace(part, sums={})

    found = list(map(take, parts))  # a loop would keep each part's sums during the next pass
    # a mapped pass has them in another order than a recorded one
    names = list(found[0].columns or ())
    columns = [
        None if part.columns is None else {name: part.columns[name] for name in names}
        for part in found
    ]
    found = [replace(part, columns=each) for part, each in zip(found, columns, strict=True)]
    if any(part.output_gradients is None for part in found):
        found = [replace(part, output_gradients=None) for part in found]
    return replace(concatenated(found), sums=first | total)


class CapturedPasses:
    """Runs batches through recorded passes that are CUDA graphs.

    A graph needs fixed shapes: a batch is padded with copies of its first example to one of a few
    sizes around the expected one (:meth:`size_for`), and the copies are masked out of the sum.

    Args:
        expected_batch: The mean batch size.
        probes_at_once: How many probes to process together.

    Attributes:
        works: False once capturing has failed.
    """

    def __init__(self, expected_batch: int, *, probes_at_once: int = 1) -> None:
        usual = {math.ceil(expected_batch + k * expected_batch**0.5) for k in _DEVIATIONS}
        self._sizes = sorted({*usual, -(-expected_batch // 2)} - {0})
        self._step = max(1, expected_batch // 8)
        self.probes_at_once = probes_at_once
        self.works = True
        self._captured: dict[tuple[Hashable, int], _Captured] = {}  # by kind and size
        # all graphs share one memory, because they are replayed one after the other
        self._pool: object = None
        self._replays = 0
        self._loaded: set[Hashable] = set()  # kinds whose kernels a warm-up has loaded
        self._asked: Counter[tuple[Hashable, int]] = Counter()

    def size_for(self, count: int, room: int) -> int:
        """The size that a batch of ``count`` examples, at most ``room``, is padded to.

        Few sizes mean few graphs, which are all captured early. The expected batch b, of Poisson
        draws, gives b/2 and five sizes from b − √b to b + 1.6 √b, which leave 5 % of a pass to
        padding at b = 32 and 3 % at b = 128; a larger batch has a multiple of b/8.
        """
        usual = [size for size in self._sizes if count <= size <= room]
        return usual[0] if usual else min(room, -(-count // self._step) * self._step)

    def begin(self, gradients: ExampleGradients, room: int, mode: Hashable) -> StartedGraph | None:
        """Replay the forward half of an existing graph for such examples.

        None: there is no such graph.

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
        """The pass over a batch.

        None if it cannot be captured, or not yet. The next pass overwrites the result.

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
        total: StepValues | None = None
        for start in range(0, count, at_once):
            examples = batch.gradients.examples[slice(start, start + at_once)]
            piece = replace(batch, gradients=replace(batch.gradients, examples=examples))
            values = self._run(piece, wanted, self.size_for(at_once, room), mode)
            if values is None:
                return None
            # the next replay overwrites it
            total = values.kept(sums=True) if total is None else joined((total, values))
        return total

    def _run(
        self,
        batch: PrivateBatch,
        wanted: Wanted,
        size: int,
        mode: Hashable,
        begun: StartedGraph | None = None,
    ) -> StepValues | None:
        kind = (signature(batch.gradients), mode, wanted.kind, batch.mechanism)
        if not self.works or self._comes_too_rarely(kind, size):
            return None

        captured, problem = None, ""
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            captured = self._captured.pop((kind, size), None)
            if captured is None:
                cold = kind not in self._loaded
                captured = _Captured(
                    batch,
                    size,
                    wanted,
                    self._pool,
                    probes_at_once=self.probes_at_once,
                    warm_up=cold,
                )
            self._captured[kind, size] = captured  # the latest comes last
            # each value of noise or threshold needs its own graph
            if len(self._captured) > _MOST_GRAPHS:
                del self._captured[next(iter(self._captured))]
        except RuntimeError as error:
            captured, problem = None, str(error)
        if captured is None:  # outside the handler, because its error holds the pass's tensors
            return self._after_failure(
                batch, wanted, size, mode, problem, warmed_up=kind not in self._loaded
            )
        self._loaded.add(kind)

        # The loop's forward pass is valid only if no other graph has overwritten its results.
        ready = begun is not None and begun.captured is captured and begun.replays == self._replays
        self._replays += 1
        return captured.replay(batch.gradients.examples, wanted, begun=ready)

    def _after_failure(
        self,
        batch: PrivateBatch,
        wanted: Wanted,
        size: int,
        mode: Hashable,
        problem: str,
        *,
        warmed_up: bool,
    ) -> StepValues | None:
        """Capture once more, with a warm-up.

        None if that was tried. The graphs' common memory may be damaged.
        """
        self._captured.clear()
        self._loaded.clear()
        self._pool = None
        release_memory()
        if not warmed_up:
            return self._run(batch, wanted, size, mode)
        logger.warning(
            "the step could not be captured in a CUDA graph and runs eagerly: %s", problem
        )
        self.works = False
        return None

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

    Attributes:
        size: How many examples it takes.
        probes_at_once: How many probes it processes together.
    """

    def __init__(
        self,
        batch: PrivateBatch,
        size: int,
        wanted: Wanted,
        pool: object,
        *,
        probes_at_once: int,
        warm_up: bool,
    ) -> None:
        gradients, device = batch.gradients, batch.gradients.device
        self.batch, self.wanted, self.size, self.probes_at_once = (
            batch,
            wanted,
            size,
            probes_at_once,
        )

        # Inputs that change between replays stay at the addresses that the graph reads.
        self.bits = tuple(
            torch.zeros(gradients.num_parameters, dtype=torch.int8, device=device)
            for _ in wanted.seeds
        )
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

    def replay(self, examples: Examples, wanted: Wanted, *, begun: bool = False) -> StepValues:
        """The pass over these examples; the next replay overwrites the result.

        Args:
            examples: The examples.
            wanted: The probes' seeds; everything else is built in.
            begun: Whether :meth:`begin` was the last replay, for these examples.
        """
        count = len(examples)
        self.count.fill_(count)
        for bits, seed in zip(self.bits, wanted.seeds, strict=True):
            draw_bits(seed, bits, self.source)
        *_, values = self.captured.replay(examples, begun=begun)
        return values.first(count)

    def _stages(self, gradients: ExampleGradients) -> Iterator[Any]:
        """The outputs, then everything."""
        mechanism, z, measured = (
            self.batch.mechanism,
            gradients.examples.z.detach(),
            bool(self.wanted.seeds),
        )
        gradients = replace(gradients, twice=measured)
        forward = forward_pass(gradients, z.requires_grad_() if measured else z)
        yield map_tensors(Tensor.detach, forward.outputs)

        jacobian = RecordedJacobian(gradients, mechanism, forward, measured=measured)
        probes = tuple(signs_of(bits, gradients.dtype) for bits in self.bits)
        draws = Draws(self.wanted.seeds, 1, self.probes_at_once, probes)
        mask = (self.places < self.count).to(gradients.dtype)
        batch = replace(self.batch, gradients=gradients)
        yield values_of(batch, [(slice(0, self.size), jacobian)], self.wanted, draws, mask)


def _passes_within(limit: int, batch: PrivateBatch, wanted: Wanted) -> Passes:
    """The passes over a batch within this many bytes: recorded, mapped over examples, or one of
    each.
    """
    gradients, passes = batch.gradients, []
    if batch.plan is not None and batch.plan.fits:
        size = max(1, batch.plan.bytes_per_example)
        passes.append((min(len(gradients), max(1, limit // size)), size))
    if not passes or wanted.estimator == EXACT:
        size = batch.working_vectors(wanted.estimator, limit)[1] * gradients.bytes_per_vector
        passes.append((min(len(gradients), max(1, limit // size)), size))
    return passes


def _shortened(reason: str) -> str:
    return reason.partition("\n")[0][:200]


def _log_plan(tried: Plan, autocast: torch.dtype | None) -> None:
    if tried.reason is not None:
        without = (
            ", and without autocast, which torch.func does not support"
            if autocast is not None
            else ""
        )
        logger.warning(
            "gradients are mapped over examples (vmap), which is slower%s: %s",
            without,
            tried.reason,
        )
    elif tried.generic:
        how = (
            "their gradients are formed example by example, which is slower (CONTRIBUTING.md "
            "shows how to add one)"
        )
        logger.info("no layer rule for %s: %s", ", ".join(tried.generic), how)
