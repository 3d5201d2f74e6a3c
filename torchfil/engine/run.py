"""The state of one training run: what is staged for the current logical batch, and the sums of all released ones.

A physical batch is staged before its clipped gradients are added to the sum, and booked when the logical batch is
released under one draw of noise. A refusal at any point leaves sums and ledger unchanged.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.contributions import Contribution
from torchfil.accounting.exposed import exposed_rows
from torchfil.accounting.ids import ExampleIds, GrowingIds
from torchfil.accounting.leakage import Conditions, Leakage
from torchfil.accounting.ledger import Ledger
from torchfil.accounting.sparing import weights_for_the_rest
from torchfil.accounting.timeline import Timeline
from torchfil.engine.clip_weights import check_same_weights, weights_by_row
from torchfil.engine.epsilon import NormHistory
from torchfil.engine.losses import IdentifiedLoss
from torchfil.engine.optimizer import FILOptimizer
from torchfil.engine.options import RunOptions
from torchfil.engine.rank_state import RowBlocks, Whole, take_part
from torchfil.engine.ranks import Ranks, StepNotTakenError
from torchfil.engine.shared_norms import SharedNormHistory
from torchfil.engine.step.forwards import ForwardPass

__all__ = ["Noise", "Run"]

logger = logging.getLogger(__name__)

_LOOKS_PER_PASS = 8  # how often the pace is adjusted and the leakage so far is noted
_FIRST_PASSES = 16  # passes over the data in which most is learned, and many examples leak most
_EXPOSED = 1 / 64  # of a batch
_OF_A_STREAM = 1 / 128  # assumed steps in a pass of a stream, whose length is unknown
_STATE = ("ledger", "history", "timeline", "test_matrix", "generator", "pace")  # what a saved state must have


@dataclass(frozen=True)
class Noise:
    """σ and C of a release."""

    noise_multiplier: float
    max_grad_norm: float

    @classmethod
    def of(cls, optimizer: FILOptimizer) -> Noise:
        """The optimizer's current values."""
        return cls(float(optimizer.noise_multiplier), float(optimizer.max_grad_norm))


@dataclass(frozen=True)
class Staged:
    """A physical batch whose logical batch has not been released yet."""

    contribution: Contribution  # in a stream, new examples get their rows when they are booked
    ratio: Tensor  # ‖g̃‖/C, [batch]
    ids: Sequence[Any]
    noise: Noise


class Run:
    """One training run under account.

    Args:
        options: How to account.
        loss: The loss; None: to be identified at the first step.
        ids: The examples' names; in a stream, those that took part so far.
        device: The device on which steps are computed.
        generator: Source of the probes.
        accounted_rate: Returns the sampling rate of the DP accountant's last step.
        expected_batch: The mean batch size, of all ranks together.
        ranks: The processes that train together; None: a single one. Each rank has the ledger of what it drew.
    """

    def __init__(
        self,
        options: RunOptions,
        loss: IdentifiedLoss | None,
        ids: ExampleIds,
        device: torch.device,
        generator: torch.Generator,
        accounted_rate: Callable[[], float],
        expected_batch: int,
        ranks: Ranks | None = None,
    ) -> None:
        self.options = options
        self._device = device
        self._place = options.accounting.rows_place(device)
        self.ranks = ranks
        self.loss = loss
        self.ids = ids
        self.generator = generator

        # refuse before anything is allocated: too many examples, unknown ids or weights
        self._check_memory(NormHistory.bytes_needed(ids.num_examples) + Ledger.bytes_needed(ids.num_examples, 1, (), 1))
        self._chosen()  # whose ids must be known
        weights = weights_by_row(options.accounting.clip_weights, self.ids)
        self.first_weights = None if weights is None else weights.to(device)  # ω as given, float64 [n]
        self.clip_weights = self._present_weights(device)

        # the ledger is made at the first batch, which shows how many coordinates are private
        self._passes_per_step = expected_batch / ids.num_examples if not self._grows else _OF_A_STREAM
        self.history = self._empty_history()
        self.ledger: Ledger | None = None
        self._whole: Whole | None = None  # what all ranks had booked when they were last combined
        self._exposed = max(2, round(_EXPOSED * expected_batch / (ranks.size if ranks is not None else 1)))
        self._steps_between_looks = max(1, round(1 / (_LOOKS_PER_PASS * self._passes_per_step)))
        self._timeline = Timeline(self._steps_between_looks)
        self._look_due: int | None = None  # the step whose leakage is still to be noted
        self.test_matrix: Tensor | None = None
        self.pace = options.accounting.pace()
        self.paused = False

        # the current step
        self._accounted_rate = accounted_rate
        self._staged: list[Staged] = []
        self._keys_of_step: list[Hashable] | None = None  # of all ranks; None: not exchanged yet
        self._measure_this_step: bool | None = None  # drawn once for a logical batch

    # ------------------------------------------------------------------ reading

    def gather(self) -> None:
        """Combine what all ranks have booked, unless this was done since the last step (collective)."""
        if self.ranks is None or self._is_gathered:
            return
        assert isinstance(self.history, SharedNormHistory)
        self.ranks.meet()
        self.history.enter()
        mine = self.ledger, self.test_matrix
        self._whole = Whole.of(self.ranks, self.history.steps, *mine, self.new_ledger, self.generator)

    @property
    def _is_gathered(self) -> bool:
        """Whether nothing has changed since the ranks were combined."""
        assert isinstance(self.history, SharedNormHistory)
        return self._whole is not None and self._whole.steps == self.history.steps and self.history.is_complete

    @property
    def whole_ledger(self) -> tuple[Ledger | None, Tensor | None]:
        """The ledger of all ranks and the test matrix of its sketch (collective); None before the first step."""
        self.gather()
        return (self.ledger, self.test_matrix) if self._whole is None else (self._whole.ledger, self._whole.test_matrix)

    @property
    def whole_history(self) -> NormHistory:
        """The norm history of all ranks (collective)."""
        self.gather()
        return self.history

    @property
    def leakage(self) -> Leakage:
        """The ledger so far, for reading; of all ranks (collective)."""
        ledger, test_matrix = self.whole_ledger
        if ledger is None:
            raise RuntimeError(
                "no private step has been taken yet, so there is nothing to report; train first (optimizer.step())"
            )
        accounting = self.options.accounting
        rate = self.options.sample_rate if self.options.amplification.secret_batches else None
        conditions = Conditions(
            exact=accounting.exact,
            sample_rate=rate,
            skipping=accounting.skips_steps,
            test_matrix=test_matrix if test_matrix is None else test_matrix.to(ledger.device),
        )
        return Leakage(ledger, self.ids, conditions)

    @property
    def device(self) -> torch.device:
        """The device on which steps are computed; the sums may be elsewhere (``Accounting.rows_at``)."""
        return self._device

    def clip_weights_of(self, ids: Sequence[int]) -> Tensor | None:
        """ω of the examples with these numbers, float64 [ids]; None: nobody has one."""
        if self.clip_weights is None:
            return None
        rows = torch.tensor(ids, dtype=torch.long).to(self.device, non_blocking=True)
        return self.clip_weights[rows]

    @property
    def timeline(self) -> Timeline:
        """How the leakage grew."""
        if self._look_due is not None and self.ledger is not None:
            self._timeline.note(self._look_due, self.ledger.sums["trace"], self.ledger.own_coordinates)
        self._look_due = None
        return self._timeline

    @property
    def inside_logical_batch(self) -> bool:
        """Whether something is staged but not booked yet."""
        return bool(self._staged)

    # ------------------------------------------------------------------ a step

    def drop_staged(self) -> None:
        """Forget what was staged for a logical batch that was given up."""
        self._staged.clear()
        self._measure_this_step = self._keys_of_step = None

    def check_noise(self, optimizer: FILOptimizer) -> Noise:
        """σ and C; refused if they have changed within a logical batch, which is released under one noise."""
        noise = Noise.of(optimizer)
        for staged in self._staged:
            if staged.noise != noise:
                before = (staged.noise.noise_multiplier, staged.noise.max_grad_norm)
                raise RuntimeError(
                    f"noise_multiplier and max_grad_norm changed from {before} to "
                    f"{(noise.noise_multiplier, noise.max_grad_norm)} within one logical batch: step their schedulers "
                    "only after a whole one. Restore the values, or call optimizer.discard_partial_batch(). This step "
                    "was not taken."
                )
        return noise

    def check_ids(self, forwards: Sequence[ForwardPass], num_gradients: int) -> list[int]:
        """The numbers of the examples in these passes, checked against the gradients and what is staged."""
        if not forwards and num_gradients:
            raise RuntimeError(
                "optimizer.step() was called with gradients that did not come through the private model's output; call "
                "the model that make_private returned, then loss.backward()"
            )
        ids: list[int] = []
        for forward in forwards:
            if forward.ids is None:
                raise RuntimeError(
                    "the model was trained on a batch that did not come from the loader that make_private returned, so "
                    "its examples are unknown; iterate over that loader"
                )
            ids += forward.ids
        if not ids and num_gradients <= 1:  # an empty batch, or Opacus's random row for one (rand_on_empty): nobody
            return ids
        if len(ids) != num_gradients:
            raise RuntimeError(
                f"{len(ids)} examples were seen in {len(forwards)} forward passes, but there are {num_gradients} "
                "per-example gradients. Call the model once per batch, with the whole batch; to use it on parts or "
                "twice, put both calls into one module."
            )

        together = set(ids).union(*(staged.ids for staged in self._staged))
        if len(together) != len(ids) + sum(len(staged.ids) for staged in self._staged):
            raise RuntimeError(
                "an example occurs twice under one draw of noise: its gradient would count twice. Check the sampler "
                "(no replacement within a batch), and do not accumulate gradients over passes that share examples."
            )
        if isinstance(self.ids, GrowingIds):
            self._check_room(self.ids.count_new(together))
        return ids

    def chooses_to_measure(self) -> bool:
        """Whether the current step is measured, drawn at random once for each logical batch."""
        if self._measure_this_step is not None:
            return self._measure_this_step
        rate = self.pace.rate
        return rate == 1 or bool(torch.rand((), generator=self._common_generator("steps", self.history.steps)) < rate)

    def _common_generator(self, purpose: str, number: int = 0) -> torch.Generator:
        """The source of numbers that must be the same on all ranks; in a single process, that of the probes."""
        return self.generator if self.ranks is None else self.ranks.common_generator(purpose, number)

    @property
    def _past_first_passes(self) -> bool:
        """Whether the first passes are over."""
        return self.history.steps * self._passes_per_step >= _FIRST_PASSES

    @property
    def num_probes(self) -> int:
        """The probes of the current step for every example of the batch; in the first passes, half the extra ones."""
        early = 0 if self._past_first_passes else -(-self.options.accounting.extra_probes // 2)
        return max(self.pace.num_probes, early)

    def exposed_rows(self, ids: Sequence[int], clipped_norm: Tensor) -> Tensor | None:
        """The rows of a batch to measure again, with more probes; None: the current step has none."""
        if not self.options.accounting.extra_probes or not self._past_first_passes or self.ledger is None:
            return None
        if self._grows:  # an example may have no row yet
            return None
        rows, sums = self._rows(ids), self.ledger.sums
        present = clipped_norm.double().square()
        trace, squares = (sums.at(name, rows).to(self.device, non_blocking=True) for name in ("trace", "squared_norm"))
        return exposed_rows(trace, squares, present, self._exposed)

    def new_ledger(self, num_coordinates: int) -> tuple[Ledger, Tensor | None]:
        """An empty ledger for d coordinates, and the test matrix of a sketch."""
        accounting, n = self.options.accounting, self.ids.num_examples
        rank = min(accounting.sketch_rank, num_coordinates)
        questions = accounting.asked
        chosen = self._chosen()
        num_chosen = {name: len(rows) for name, rows in chosen.items()}
        needed = Ledger.bytes_needed(n, num_coordinates, accounting.track, rank, questions, num_chosen)
        needed += NormHistory.bytes_needed(n)
        self._check_memory(needed)
        logger.info("the ledger takes %.1f MiB on %s", needed / 2**20, self._place)
        ledger = Ledger(
            n,
            num_coordinates,
            track=accounting.track,
            sketch_rank=rank,
            device=self._place,
            questions=questions,
            chosen=chosen,
        )
        ledger.steps = self.history.steps  # of empty batches
        if not accounting.needs.products:
            return ledger, None
        generator = self._common_generator("sketch")  # products with it are summed over ranks
        gaussian = torch.randn(num_coordinates, rank, generator=generator, dtype=torch.float64)
        return ledger, torch.linalg.qr(gaussian).Q.to(self.device)

    def _chosen(self) -> dict[str, Tensor]:
        """By tracked quantity, the rows of the ids for which it is kept, ascending, if these are not all."""
        chosen = self.options.accounting.chosen
        if chosen and self.ranks is not None:
            raise ValueError("track= with chosen ids needs a single process; with several, track all or less")
        return {name: self.ids.places(ids).unique() for name, ids in chosen.items()}

    def stage(
        self,
        ids: Sequence[int],
        clipped_norm: Tensor,
        added: dict[str, Tensor] | None,
        noise: Noise,
        *,
        measure: bool,
        num_coordinates: Tensor | int | None = None,
    ) -> None:
        """Keep what a physical batch adds until it is released.

        Args:
            ids: The numbers of the examples.
            clipped_norm: ‖g̃‖, [batch].
            added: What the ledger adds; None if nothing was measured.
            noise: The noise of the release.
            measure: Whether the step is measured.
            num_coordinates: How many private coordinates each example has, [batch], or one number for all.
        """
        self._measure_this_step = measure
        if not ids:
            return
        rows = self._rows([] if self._grows else ids)
        squares = clipped_norm.square()
        contribution = Contribution(rows, squares, not self.paused, added or {}, num_coordinates)
        self._staged.append(Staged(contribution, clipped_norm / noise.max_grad_norm, tuple(ids), noise))

    def _rows(self, rows: Sequence[int]) -> Tensor:
        """Numbers of examples on the sums' device; they go there early, because reading them from a GPU would wait."""
        return torch.tensor(rows, dtype=torch.long).to(self.history.device, non_blocking=True)

    def book(self, optimizer: FILOptimizer) -> None:
        """Book the released logical batch: enter what was staged."""
        _ = self.timeline  # due readings happen before this step, while a GPU computes it
        self._enter_ids()
        contributions = [staged.contribution for staged in self._staged]
        if contributions:
            assert self.ledger is not None
            sums = self.ledger.add(*contributions)
            for contribution in contributions:
                self.pace.note(contribution)
            self._spare(torch.cat([contribution.rows for contribution in contributions]), sums)
        if self.ledger is not None:
            self.ledger.steps += 1
            self.ledger.missed_steps += int(self.paused)
        self._note_leakage(self.history.steps + 1)

        rows, ratios = [contribution.rows for contribution in contributions], [s.ratio for s in self._staged]
        self.history.step(
            _joined(rows, self._rows([])),
            _joined(ratios, torch.zeros(0, device=self.device)),
            float(optimizer.noise_multiplier),
            self._accounted_rate(),
        )
        self.drop_staged()
        if self.ledger is not None and self.history.steps % self._steps_between_looks == 0:
            self.pace.update(self.ledger, self.history.steps * self._passes_per_step)

    # ------------------------------------------------------------------ a stream's examples

    @property
    def _grows(self) -> bool:
        """Whether the run is on a stream, in which new examples arrive."""
        return isinstance(self.ids, GrowingIds)

    def settle_ids(self) -> None:
        """Tell all ranks which examples of their streams take part in this step (collective there).

        Raises:
            StepNotTakenError: On all ranks, if two of them have the same example.
        """
        own = [key for staged in self._staged for key in staged.ids]
        if not self._grows or self.ranks is None:
            self._keys_of_step = own
            return
        by_rank = self.ranks.objects(own)
        self._keys_of_step = [key for keys in by_rank for key in keys]
        if len(set(self._keys_of_step)) < len(self._keys_of_step):
            twice = next(key for key, count in Counter(self._keys_of_step).items() if count > 1)
            raise StepNotTakenError(
                f"example {twice!r} is in this step's batches of ranks "
                f"{[rank for rank, keys in enumerate(by_rank) if twice in keys]}: its gradient would count twice under "
                "one draw of noise. Give every rank its own shards. This step was not taken."
            )

    def _settled(self) -> list[Hashable]:
        """Who takes part in this step, on all ranks; they exchange this before it is released."""
        if self._keys_of_step is None:
            self.settle_ids()
        assert self._keys_of_step is not None
        return self._keys_of_step

    def most_participations(self) -> int:
        """The largest number of participations of any example of a stream, including the current step."""
        assert isinstance(self.ids, GrowingIds)
        return self.ids.most_after(self._settled())

    def _enter_ids(self) -> None:
        """Give the new examples of a stream their rows, the same on all ranks, also in what is staged."""
        if not isinstance(self.ids, GrowingIds):
            return
        keys = self._settled()
        row_of = dict(zip(keys, self.ids.enter(keys), strict=True))
        self.history.grow(self.ids.num_examples)
        if self.ledger is not None:
            self.ledger.grow(self.ids.num_examples)
        self._staged = [
            replace(staged, contribution=replace(staged.contribution, rows=self._rows([row_of[k] for k in staged.ids])))
            for staged in self._staged
        ]

    def _check_room(self, new: int) -> None:
        """Raise if this many more examples do not fit into memory."""
        n, ledger = self.ids.num_examples + new, self.ledger
        if ledger is not None:
            each = Ledger.bytes_needed(1, ledger.laid_out, ledger.track, ledger.sketch_rank, ledger.questions)
            self._check_memory(n * each + NormHistory.bytes_needed(n))

    def _note_leakage(self, step: int) -> None:
        """Note the leakage so far, of all ranks, if it is due at this step (collective then)."""
        ledger = self.ledger
        if not self._timeline.is_due(step):
            return
        if self.ranks is None:
            self._look_due = step if ledger is not None else None
        else:
            empty = torch.zeros(2, self.ids.num_examples, dtype=torch.float64)
            trace, own = empty if ledger is None else (ledger.sums["trace"], ledger.sums["num_coordinates"].double())
            trace, own = self.ranks.sum(trace), self.ranks.maximum(own)
            if bool(own.any()):  # nobody was drawn yet
                self._timeline.note(step, trace.to(self.device), own.clamp(min=1).to(self.device))

    def _present_weights(self, device: torch.device) -> Tensor | None:
        """ω before anybody leaked anything; a separate copy for everybody if a bound is kept."""
        if self.options.accounting.min_mse_bound is None:
            return self.first_weights
        if self.first_weights is not None:
            return self.first_weights.clone()
        return torch.ones(self.ids.num_examples, dtype=torch.float64, device=device)

    def _spare(self, rows: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Lower the weights of these examples, with these sums, if they come close to the bound to keep."""
        kept = self.options.accounting.min_mse_bound
        if kept is None or self.clip_weights is None:
            return
        rows = rows.to(self.device, non_blocking=True)
        weights = weights_for_the_rest(kept * sums["trace"] / sums["num_coordinates"].clamp(min=1)).to(self.device)
        if self.first_weights is not None:
            weights = weights * self.first_weights[rows]
        self.clip_weights.index_copy_(0, rows, weights)  # in place, because a copy of all is as long as the data set

    def _empty_history(self) -> NormHistory:
        n = self.ids.num_examples
        if self.ranks is None:
            return NormHistory(n, self._place, self.first_weights, own_steps=self._grows)
        every = max(1, round(1 / self._passes_per_step))
        return SharedNormHistory(n, self._place, self.ranks, every, self.first_weights, own_steps=self._grows)

    @contextlib.contextmanager
    def generator_kept(self, state: Tensor) -> Iterator[None]:
        """Restore the probes' generator to this state if the work inside is refused."""
        try:
            yield
        except Exception:
            self.generator.set_state(state)
            raise

    def _check_memory(self, needed: int) -> None:
        accounting = self.options.accounting
        if needed > accounting.max_ledger_memory:
            raise MemoryError(
                f"the ledger would take {needed / 2**30:.2f} GiB, over the limit of "
                f"{accounting.max_ledger_memory / 2**30:.2f} GiB. Track less (track={tuple(accounting.track)}) or for "
                f"chosen ids only, or confirm with accounting=Accounting(max_ledger_memory={needed})."
            )

    # ------------------------------------------------------------------ state

    def state_dict(self, *, in_blocks: bool = False) -> dict[str, Any]:
        """Ledger, norm history, timeline, test matrix, the examples' weights and the probes' generator (collective).

        Args:
            in_blocks: Whether each of several ranks holds a block of the rows, as one distributed tensor (DTensor).
        """
        if self._staged:
            raise RuntimeError("the state can be saved only between logical batches; finish the batch first")
        if in_blocks and self.ranks is not None:
            return self._state_in_blocks(self.ranks)
        self.gather()
        return self._state(self._whole)

    def _state_in_blocks(self, ranks: Ranks) -> dict[str, Any]:
        """The state, with a block of the rows on each rank."""
        assert isinstance(self.history, SharedNormHistory)
        ranks.meet()
        self.history.enter()
        blocks = RowBlocks(ranks, self.ids.num_examples)
        mine = self.ledger, self.test_matrix
        whole = Whole.of(ranks, self.history.steps, *mine, self.new_ledger, self.generator, blocks)
        state = self._state(whole)

        # the ledger was combined in blocks; other rows are the same on all ranks
        for name in ("history", "clip_weights", "present_weights"):
            state[name] = blocks.shared(state[name])
        ledger, parts = state["ledger"], state["ranks"]
        if ledger is not None:
            ledger["num_coordinates"] = max(ranks.objects(ledger["num_coordinates"]))
            ledger["sums"] = {name: blocks.together(value) for name, value in ledger["sums"].items()}
            parts["booked_by"] = blocks.together(parts["booked_by"])
        return state

    def _state(self, whole: Whole | None) -> dict[str, Any]:
        """The state, with what all ranks have booked; None: a single process."""
        ledger, test_matrix = (self.ledger, self.test_matrix) if whole is None else (whole.ledger, whole.test_matrix)
        state: dict[str, Any] = {
            "ledger": ledger.state_dict() if ledger is not None else None,
            "history": self.history.state_dict(),
            "timeline": self.timeline.state_dict(),
            "test_matrix": test_matrix,
            "generator": self.generator.get_state(),
            "pace": self.pace.state_dict(),
            "clip_weights": self.first_weights,
            "min_mse_bound": self.options.accounting.min_mse_bound,
            "present_weights": None if self.clip_weights is None else self.clip_weights.clone(),
        }
        if self._grows:
            state["keys"] = self.ids.all()
        return state if whole is None else {**state, "ranks": dict(whole.parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; checks everything before it changes anything."""
        missing = [key for key in _STATE if key not in state]
        if missing:
            raise ValueError(f"the run's state lacks {missing}; was it saved by another version?")
        check_same_weights(state.get("clip_weights"), self.first_weights, self.ids)
        kept, own = state.get("min_mse_bound"), self.options.accounting.min_mse_bound
        if kept != own:
            raise ValueError(f"the saved run keeps min_mse_bound={kept}, this run {own}; pass the same")
        ledger, track = None, tuple(self.options.accounting.track)
        if state["ledger"] is not None:
            ledger = Ledger.from_state_dict(state["ledger"], self._place)
            if not self._grows and ledger.num_examples != self.ids.num_examples:
                raise ValueError(
                    f"the saved ledger has {ledger.num_examples} examples, the data set {self.ids.num_examples}"
                )
            if set(ledger.track) != set(track):
                raise ValueError(f"the saved ledger tracks {ledger.track}, this run {track}; pass the same track=")
            chosen = self._chosen()
            if chosen.keys() != ledger.chosen.keys() or any(
                not torch.equal(rows, ledger.chosen[name]) for name, rows in chosen.items()
            ):
                raise ValueError("the saved ledger tracks other ids than this run; pass the same track=")
            asked = self.options.accounting.asked
            if ledger.questions != asked:
                raise ValueError(
                    f"the saved ledger has the questions {ledger.questions}, this run {asked}; pass the same questions="
                )
        ids = self._loaded_ids(state.get("keys"), ledger)
        history = self._empty_history()
        if self._grows:
            history.grow(ids.num_examples)
        history.load_state_dict(state["history"])
        timeline = Timeline.from_state_dict(state["timeline"], history.device if self.ranks is None else self.device)

        self.generator.set_state(state["generator"].cpu())
        if self.ranks is not None:
            take_part(self.ranks, state.get("ranks"), ledger, history.steps, self.generator)
        self.pace.load_state_dict(state["pace"])
        self.ids, self.ledger, self.history, self._whole = ids, ledger, history, None
        self._timeline, self._look_due = timeline, None
        present = state.get("present_weights")
        self.clip_weights = self._present_weights(self.device) if present is None else present.to(self.device).clone()
        matrix = state["test_matrix"]
        self.test_matrix = matrix.to(self.device) if matrix is not None else None
        self.drop_staged()

    def _loaded_ids(self, keys: Sequence[Hashable] | None, ledger: Ledger | None) -> ExampleIds:
        """The examples' names of a saved run; those of a stream are in its state."""
        if self._grows != (keys is not None):
            kinds = "a stream", "a data set with numbered examples"
            raise ValueError(f"the saved run was on {kinds[keys is None]}, this one is on {kinds[not self._grows]}")
        if keys is None:
            return self.ids
        return GrowingIds(keys, None if ledger is None else ledger.sums["participations"].tolist())


def _joined(parts: list[Tensor], empty: Tensor) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else next(iter(parts), empty)
