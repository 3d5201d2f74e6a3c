"""The state of one training run: the sums of all released batches, and what the next one is
measured with.

A physical batch is staged before its clipped gradients are added to the sum, and
booked when the logical batch is released under one draw of noise. A refusal at any point leaves
sums and ledger unchanged.

An example may have its own clip threshold: its clipped gradient is multiplied by ω ∈ (0, 1].
With g̃ = ωφ(‖g‖) g, an example's norm is at most ωC; noise and ε stay those of C, and the example
leaks less. ω is held fixed in every bound: if the weights were chosen from the data, the bounds do
not count what the weights reveal.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from opacus.accountants import IAccountant
from torch import Tensor

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Leakage
from torchfil.accounting.ledger import Contribution, Ledger, Timeline
from torchfil.accounting.norms import NormHistory
from torchfil.accounting.owners import Owners
from torchfil.accounting.persons import Persons
from torchfil.accounting.quantities import Conditions, question_column, tracked
from torchfil.accounting.sums import Column
from torchfil.clipping import check_clip_weights
from torchfil.engine.distributed.ranks import (
    Ranks,
    StepNotTakenError,
    Whole,
    move_rows,
    take_part,
)
from torchfil.engine.forward import ForwardPass
from torchfil.engine.losses import IdentifiedLoss
from torchfil.engine.measure import StepValues
from torchfil.engine.optimizer import FILOptimizer
from torchfil.engine.options import ClipWeights, RunOptions
from torchfil.engine.rows import OverRows, OwnedRows, rows_by_owner
from torchfil.fisher.mechanism import largest_divergences, step_divergence
from torchfil.private import Examples
from torchfil.utils.errors import put_back_after_errors
from torchfil.utils.noise import derived_seed

logger = logging.getLogger(__name__)

_LOOKS_PER_PASS = 8  # how often the pace is adjusted and the leakage so far is noted
_LEAST_STRIDE = 8  # steps between points of the timeline: reading the ledger books its queue
_OF_A_STREAM = 1 / 128  # assumed steps in a pass of a stream, whose length is unknown


class Noise(NamedTuple):
    """σ and C of a release."""

    noise_multiplier: float
    max_grad_norm: float


@dataclass(frozen=True)
class Staged:
    """A physical batch whose logical batch has not been released yet."""

    contribution: Contribution
    ratio: Tensor  # ‖g̃‖/C, [batch]
    noise: Noise


class Run:
    """One training run under account.

    Args:
        options: How to account.
        loss: The loss; None: to be identified at the first step.
        ids: The examples' names; in a stream, of those that have arrived.
        device: The device on which steps are computed.
        seed: The seed of the probes, the same on all ranks.
        accountant: The DP accountant.
        expected_batch: The mean batch size, of all ranks together.
        ranks: The processes that train together; None: a single one. Each rank has the ledger of
            what it drew.
        owners: Who owns which row, if that is known.
        row_ids: The rows' ids, if the examples are owners.

    Attributes:
        timeline: How the leakage grew.
        staged: The physical batches since the last release, in order.
        is_updated: Whether the update of the last booked step was made.
    """

    def __init__(
        self,
        options: RunOptions,
        loss: IdentifiedLoss | None,
        ids: ExampleIds,
        device: torch.device,
        seed: int,
        accountant: IAccountant,
        expected_batch: int,
        ranks: Ranks | None = None,
        owners: Owners | None = None,
        row_ids: ExampleIds | None = None,
    ) -> None:
        self.options, self.loss, self.ids = options, loss, ids
        self.owners, self.row_ids = owners, row_ids
        self.device, self.seed, self.ranks = device, seed, ranks
        # whether an attacker may: they are not Poisson draws
        self._knows_batches = options.sample_rate is None

        # refuse before anything is allocated: too many examples, unknown ids or weights
        self._check_memory(
            NormHistory.bytes_needed(ids.num_examples) + Ledger.bytes_needed(ids.num_examples, 1)
        )
        given = weights_by_row(options.accounting.clip_weights, self.ids)
        self.clip_weights = None if given is None else given.to(device)  # ω of every example, [n]

        # the ledger is made at the first batch, which shows how many coordinates are private
        self._passes_per_step = expected_batch / (ids.num_examples or expected_batch / _OF_A_STREAM)
        self.history = self._empty_history()
        self.ledger: Ledger | None = None
        self.not_smooth: list[str] = []
        self._whole: Whole | None = None  # what all ranks had booked when they were last combined
        self._held: Tensor | None = None  # the places that this rank draws from
        # the first step of another division of the data, until it is booked
        self._waiting: tuple[Tensor, list[Contribution], dict[str, float]] | None = None
        self._steps_between_looks = max(1, round(1 / (_LOOKS_PER_PASS * self._passes_per_step)))
        self.timeline = Timeline(max(_LEAST_STRIDE, self._steps_between_looks))
        num_rows = 0 if owners is None else len(owners.of_row)
        # seen so far, not shared
        self._coordinates_of_rows = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.pace = options.accounting.pace(is_stream=ids.grows)
        self.paused = False
        self.persons: Persons | None = None
        if owners is not None and not options.accounting.by_owner and ranks is None:
            asked, rate = options.accounting.asked, self._draw_rate
            self.persons = Persons(owners, asked, lambda: self.leakage, rate, self.clip_weights)

        # the current step
        self._grouped: tuple[list[int] | None, list[OwnedRows]] = (
            None,
            [],
        )  # the last batch's ids, and its rows by owner
        self.accountant = accountant
        self.is_updated = True
        self.clear_batch()
        if self._knows_batches:
            ids.count_from([0] * ids.num_examples)

    @property
    def _draw_rate(self) -> float | None:
        """q, if an attacker does not know the batches."""
        return self.options.sample_rate if self.options.amplification.secret_batches else None

    # ------------------------------------------------------------------ reading

    def gather(self) -> None:
        """Combine what all ranks have booked, unless this was done since the last step
        (collective).
        """
        last = -1 if self._whole is None or not self.history.is_complete else self._whole.steps
        if self.ranks is None or last == self.history.steps:
            return
        self.ranks.meet()
        self.history.enter()
        if self.owners is not None:
            self._coordinates_of_rows = self.ranks.maximum(self._coordinates_of_rows).to(
                self.device
            )
        self._whole = Whole.of(self.ranks, self.history.steps, self.ledger, self.new_ledger)

    @property
    def whole_ledger(self) -> Ledger | None:
        """The ledger of all ranks (collective); None before the first step."""
        self.gather()
        ledger = self.ledger if self._whole is None else self._whole.ledger
        if ledger is not None:
            ledger.grow(self.ids.num_examples)
        return ledger

    @property
    def whole_history(self) -> NormHistory:
        """The norm history of all ranks (collective)."""
        self.gather()
        return self.history

    @property
    def leakage(self) -> Leakage:
        """The ledger so far, for reading; of all ranks (collective)."""
        ledger = self.whole_ledger
        if ledger is None:
            raise RuntimeError(
                "no private step has been taken yet, so there is nothing to report; train first"
            )
        accounting = self.options.accounting
        secret = self._draw_rate is not None
        largest = largest_divergences(self.accountant.history) if secret else None
        skipping = self.pace.is_planned or accounting.fil_rate < 1
        conditions = Conditions(accounting.exact, skipping, largest)
        return Leakage(ledger, self.ids, conditions)

    # ------------------------------------------------------------------ a step

    def clear_batch(self) -> None:
        """Forget what was staged: it was booked, or the logical batch was given up."""
        self.staged: list[Staged] = []
        self._participants: list[int] | None = None  # on all ranks; None: not exchanged yet

    @property
    def _staged_ids(self) -> list[int]:
        """The examples that this process has staged."""
        return [row for staged in self.staged for row in staged.contribution.rows.tolist()]

    def check_noise(self, optimizer: FILOptimizer) -> Noise:
        """σ and C; refused if they have changed within a logical batch, which is released under one
        noise.
        """
        noise = Noise(float(optimizer.noise_multiplier), float(optimizer.max_grad_norm))
        if self.staged and self.staged[0].noise != noise:  # the others were compared with it
            raise RuntimeError(
                f"noise_multiplier and max_grad_norm changed from {tuple(self.staged[0].noise)} "
                f"to {tuple(noise)} within one logical batch. Restore the values, or call "
                "optimizer.discard_partial_batch(). This step was not taken."
            )
        return noise

    def check_ids(self, calls: Sequence[ForwardPass], num_gradients: int) -> list[int]:
        """The numbers of the examples in these passes, checked against the gradients and what is
        staged.
        """
        if any(call.ids is None for call in calls):
            raise RuntimeError(
                "a batch that did not come from the loader that make_private returned: who is in "
                "it is unknown; iterate over that loader"
            )
        ids: list[int] = [number for call in calls for number in call.ids or ()]
        # an empty batch, or Opacus's random row for one (rand_on_empty): nobody
        if not ids and num_gradients <= 1:
            return ids
        if len(ids) != num_gradients:
            raise RuntimeError(
                f"{len(ids)} examples in {len(calls)} forward passes, but {num_gradients} "
                "per-example gradients. Call the model once per batch; examples come first in "
                "outputs (and in inputs: batch_first=False)."
            )

        # one noise covers each example once, with all of its rows
        if self.options.accounting.by_owner:
            ids = [owner for call in calls for part in self.by_owner(call) for owner in part.owners]
        staged = self._staged_ids
        together = {*ids, *staged}
        if len(together) < len(ids) + len(staged):
            raise RuntimeError(
                "an example occurs twice under one draw of noise: its gradient would count twice. "
                "Sample without replacement, and accumulate no passes that share examples."
            )
        return ids

    def rows_of(self, keys: Sequence[Hashable]) -> list[int]:
        """The rows of a stream's examples that arrive; all ranks call it with the same ones."""
        n = self.ids.num_examples + self.ids.count_new(keys)
        if self.ledger is not None:
            self._check_memory(n * self.ledger.bytes_per_example + NormHistory.bytes_needed(n))
            self.ledger.grow(n)
        self.history.grow(n)
        return self.ids.rows_of(keys)

    def by_owner(self, call: ForwardPass) -> list[OwnedRows]:
        """The rows of a call by owner, in parts in which owners have about as many."""
        if call.ids is not self._grouped[0]:
            largest = None if self.owners is None else int(self.owners.counts.max())
            largest = min(
                filter(None, (largest, self.options.accounting.rows_per_owner)), default=None
            )
            self._grouped = call.ids, rows_by_owner(call.ids or (), self.owners, largest)
        return self._grouped[1]

    def loss_of_examples(self, loss: IdentifiedLoss) -> IdentifiedLoss | OverRows:
        """The loss of an example; of its rows together, if it is an owner."""
        accounting = self.options.accounting
        return (
            OverRows(loss, row_reduction=accounting.row_reduction) if accounting.by_owner else loss
        )

    def coordinates_of(
        self, call: ForwardPass, examples: Examples, part: OwnedRows | None
    ) -> Tensor | int:
        """How many private coordinates each example has, [batch], or one number for all.

        If an owner brings only some of its rows, these are the coordinates of all rows that it has
        brought so far.
        """
        some = self.options.accounting.rows_per_owner is not None
        if (
            part is not None
            and not some
            and all(slot.own is None for slot in examples.layout.slots)
        ):
            size = examples.num_coordinates - (shared := examples.shared_coordinates)
            return part.counts * (size // (self.max_rows or examples.num_rows)) + shared
        if part is None or self.owners is None or not some:
            return examples.own_coordinates
        by_row, shared = examples.coordinates_by_row, examples.shared_coordinates
        numbers, places = (
            each.to(self.device) for each in (torch.tensor(call.ids)[part.rows], part.places)
        )
        self._coordinates_of_rows[numbers] = by_row.flatten()[places]
        of_row, empty = (
            self.owners.of_row.to(self.device),
            self._coordinates_of_rows.new_zeros(len(self.owners)),
        )
        of_owners = empty.index_add(0, of_row, self._coordinates_of_rows)
        return of_owners[torch.tensor(part.owners).to(self.device)] + shared

    @property
    def rows_in_words(self) -> str:
        """A text that distinguishes runs in which people have different rows.

        Empty if rows have no owners.
        """
        if self.owners is None:
            return ""
        digest = hashlib.sha256(self.owners.of_row.numpy().tobytes()).hexdigest()[:16]
        names, accounting = ("unit", "rows_per_owner", "row_reduction"), self.options.accounting
        return ", ".join(
            [
                *(f"{name}={getattr(accounting, name)!r}" for name in names),
                f"owners (SHA-256 {digest})",
            ]
        )

    @cached_property
    def max_rows(self) -> int | None:
        """How many rows z has room for, if owners' coordinates are summed one by one."""
        summed = any(
            quantity.by_coordinate for quantity in tracked(tuple(self.options.accounting.track))
        )
        return int(self.owners.counts.max()) if self.owners is not None and summed else None

    def participants(self) -> list[int]:
        """Who takes part in this step, on all ranks.

        They exchange it once (collective, unless draws are Poisson).

        Raises:
            StepNotTakenError: On all ranks, if two of them have the same example.
        """
        if self._participants is None:
            own = self._staged_ids  # those of Poisson draws come from separate parts of the data
            by_rank = (
                [own] if self.ranks is None or not self._knows_batches else self.ranks.objects(own)
            )
            self._participants = [row for rows in by_rank for row in rows]
            if len(set(self._participants)) < len(self._participants):
                twice = next(row for row, count in Counter(self._participants).items() if count > 1)
                ranks = [rank for rank, rows in enumerate(by_rank) if twice in rows]
                name = self.ids.all()[twice]
                raise StepNotTakenError(
                    f"example {name!r} is in this step's batches of ranks {ranks}: its gradient "
                    "would count twice. Give every rank its own shards. This step was not taken."
                )
        return self._participants

    def chooses_to_measure(self) -> bool:
        """Whether the current step is measured: at random, and the same for all of its batches on
        all ranks.
        """
        return (
            random.Random(derived_seed(self.seed, "steps", self.history.steps)).random()
            < self.pace.rate
        )

    def probe_seeds(self, count: int, purpose: str, piece: int) -> tuple[int, ...]:
        """The seeds of this many probes of the current step; a step that is repeated has the same.

        Args:
            count: How many.
            purpose: What they are for: each purpose has its own.
            piece: Which piece of the current physical batch they probe.
        """
        rank = 0 if self.ranks is None else self.ranks.rank
        place = self.history.steps, rank, len(self.staged), piece
        return tuple([derived_seed(self.seed, purpose, *place, k) for k in range(count)])

    def weights_of(self, ids: Sequence[int]) -> Tensor | None:
        """ω of the examples with these numbers, float64 [ids]; None: nobody has one."""
        if self.clip_weights is None:
            return None
        return self.clip_weights[
            torch.tensor(ids, dtype=torch.long).to(self.device, non_blocking=True)
        ]

    def new_ledger(self, num_coordinates: int) -> Ledger:
        """An empty ledger for d coordinates."""
        accounting, n = self.options.accounting, self.ids.num_examples
        kept = (accounting.track, accounting.asked)
        needed = Ledger.bytes_needed(n, num_coordinates, *kept) + NormHistory.bytes_needed(n)
        self._check_memory(needed)
        logger.info("the ledger takes %.1f MiB on %s", needed / 2**20, self.device)
        ledger = Ledger(n, num_coordinates, self.device, *kept, self._draw_rate)
        ledger.steps = self.history.steps  # of empty batches
        if self._held is not None:
            mask = torch.zeros(n, dtype=torch.bool).index_fill(0, self._held, True)
            ledger.held = mask.to(self.device)
        return ledger

    def ledger_for(self, examples: Sequence[Examples]) -> Ledger:
        """The ledger that takes these examples; the first step makes it."""
        if self.ledger is None:
            return self.new_ledger(examples[0].num_coordinates)
        for part in examples:
            self.ledger.check_coordinates(part.num_coordinates)
        return self.ledger

    def stage(
        self, ids: Sequence[int], values: StepValues, noise: Noise, num_coordinates: Tensor | int
    ) -> None:
        """Keep what a physical batch adds until it is released.

        Args:
            ids: The numbers of the examples.
            values: What was measured.
            noise: The noise of the release.
            num_coordinates: How many private coordinates each example has, [batch], or one number
                for all.
        """
        rows, norm = torch.tensor(ids, dtype=torch.long), values.clipped_norm
        columns = dict(values.columns or {})
        if not self.paused:
            columns |= self._memberships(norm, noise)
        contribution = Contribution(
            rows,
            norm.square(),
            columns,
            self.pace.rate,
            num_coordinates,
            values.norm,
        )
        self.staged.append(Staged(contribution, norm / noise.max_grad_norm, noise))

    def _memberships(self, norm: Tensor, noise: Noise) -> dict[str, Column]:
        """The columns of questions about membership, for which clipped norms are enough."""
        asked = self.options.accounting.asked
        names = [name for name, question in asked.items() if question.membership]
        if not names:
            return {}
        square, rate = norm.double().square(), self._draw_rate
        if noise.noise_multiplier == 0:
            step = torch.where(square > 0, math.inf, 0.0).double()
        else:
            none = torch.zeros_like(square)
            ratio = square / (noise.noise_multiplier * noise.max_grad_norm) ** 2
            step = step_divergence(ratio, none, none, rate) / (1.0 if rate is None else rate)
        return {question_column(name): {"value": step[:, None]} for name in names}

    def all_or_none(self) -> AbstractContextManager[None]:
        """Inside, accountant and ledger book a step; after an error, or Ctrl-C, neither has.

        Opacus's accountants take their last entry out to count it up. Sums are queued, so that
        little is copied; room for them is made first, because what a full queue adds to the sums is
        not put back.
        """
        self._make_room()
        parts = [self, self.accountant, self.history, *self._ledgers]
        return put_back_after_errors(
            map(vars, parts if self.persons is None else [*parts, self.persons])
        )

    def book(self, optimizer: FILOptimizer, held: Tensor | None = None) -> None:
        """Book the released logical batch: queue what was staged.

        Args:
            optimizer: Has the noise.
            held: The places that this rank draws from; None: everybody.
        """
        if self._knows_batches:
            self.ids.count(self.participants())
        contributions = [staged.contribution for staged in self.staged]
        noise = {
            name: float(getattr(optimizer, name)) for name in ("noise_multiplier", "max_grad_norm")
        }
        same = self._held is not None and held is not None and torch.equal(held, self._held)
        if held is not None and not same:  # after the update, because it is collective
            self._waiting = held, contributions, noise
        elif self.ledger is not None:
            self.ledger.add(*contributions, **noise, paused=self.paused)

        # rows on the CPU, because reading them from a GPU would wait
        rows = [each.rows for each in contributions] or [torch.zeros(0, dtype=torch.long)]
        ratios = [staged.ratio for staged in self.staged] or [torch.zeros(0, device=self.device)]
        rate = float(self.accountant.history[-1][1]) if self.accountant.history else 1.0
        if self.pace.is_planned:
            self.pace.note(contributions)
        self.history.step(
            torch.cat(rows), torch.cat(ratios), float(optimizer.noise_multiplier), rate
        )
        if self.persons is not None:
            self.persons.book(torch.cat(rows), torch.cat(ratios), float(optimizer.noise_multiplier))
        self.clear_batch()
        self.is_updated = False

    def end_step(self) -> None:
        """After the update, do what may take long, and can be stopped without any harm (collective
        now and then).
        """
        self.is_updated = True
        if self._waiting is not None:
            self._divide(*self._waiting)
        self._note_leakage(self.history.steps)
        self._make_room()
        if self.pace.is_planned and self.history.steps % self._steps_between_looks == 0:
            if self.ledger is not None:
                self.pace.update(self.ledger, self.history.steps * self._passes_per_step)
            if self.ranks is not None:  # what the most demanding part of the data needs
                plan = torch.tensor([self.pace.num_probes, self.pace.rate], dtype=torch.float64)
                probes, rate = self.ranks.maximum(plan).tolist()
                self.pace.num_probes, self.pace.rate = int(probes), rate

    def _divide(
        self, held: Tensor, contributions: Sequence[Contribution], noise: Mapping[str, float]
    ) -> None:
        """Book the first step of another division of the data among the ranks (collective)."""
        assert self.ranks is not None
        mask = torch.zeros(self.ids.num_examples, dtype=torch.bool).index_fill(0, held, True)
        if self.history.steps > 1:
            self.ledger = move_rows(self.ledger, self.ranks, mask, self.new_ledger)
        if self.ledger is not None:
            self.ledger.held = mask.to(self.ledger.device)
            self.ledger.add(*contributions, **noise, paused=self.paused)
        self._held, self._waiting = held, None

    def _make_room(self) -> None:
        """Book what is queued if it is much."""
        for ledger in self._ledgers:
            ledger.flush_if_full()
        self.history.enter_if_full()

    @property
    def _ledgers(self) -> list[Ledger]:
        """The ledger, and that of the persons of a run by row, as far as there are any."""
        every = self.ledger, None if self.persons is None else self.persons.ledger
        return [each for each in every if each is not None]

    def _note_leakage(self, step: int) -> None:
        """Note the leakage so far, of all ranks, if it is due at this step (collective then)."""
        ledger = self.ledger
        if not self.timeline.is_due(step):
            return
        if self.ranks is None:
            if ledger is not None:
                self.timeline.note(step, ledger.traces(), ledger.own_coordinates)
        else:
            empty = torch.zeros(2, self.ids.num_examples, dtype=torch.float64)
            trace, own = (
                empty if ledger is None else (ledger.traces(), ledger.own_coordinates.double())
            )
            trace, own = self.ranks.sum(trace), self.ranks.maximum(own)
            if own.any():  # nobody was drawn yet
                self.timeline.note(step, trace.to(self.device), own.clamp(min=1).to(self.device))

    def _empty_history(self) -> NormHistory:
        n, own_steps = self.ids.num_examples, self._knows_batches
        if self.ranks is None:
            return NormHistory(n, self.device, self.clip_weights, own_steps=own_steps)
        every = max(1, round(1 / self._passes_per_step))
        return NormHistory(
            n,
            self.device,
            self.clip_weights,
            own_steps=own_steps,
            exchange=self.ranks.joined,
            every=every,
        )

    def _check_memory(self, needed: int) -> None:
        accounting = self.options.accounting
        if needed > accounting.max_ledger_memory:
            raise MemoryError(
                f"the ledger of track={tuple(accounting.track)} would take {needed / 2**30:.2f} "
                f"GiB, over the limit of {accounting.max_ledger_memory / 2**30:.2f} GiB. Track "
                f"less, or pass Accounting(max_ledger_memory={needed})."
            )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Ledger, norm history, timeline and the probes' seed (collective)."""
        if self.staged:
            raise RuntimeError(
                "a state can be saved and loaded only between logical batches; finish the batch "
                "first, or call optimizer.discard_partial_batch()"
            )
        ledger = self.whole_ledger
        state: dict[str, Any] = {
            "ledger": ledger.state_dict() if ledger is not None else None,
            "history": self.history.state_dict(),
            "timeline": self.timeline.state_dict(),
            "seed": self.seed,
            "pace": self.pace.state_dict(),
            "not_smooth": list(self.not_smooth),
            "ranks": None if self._whole is None else dict(self._whole.parts),
            "coordinates_of_rows": self._coordinates_of_rows.clone(),
            "persons": None
            if self.persons is None
            else [self.persons.ledger.state_dict(), self.persons.last.clone()],
        }
        return {**state, "keys": self.ids.all()} if self.ids.grows else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`, of a run that was made as this one."""
        ledger = (
            None
            if state["ledger"] is None
            else Ledger.from_state_dict(state["ledger"], self.device)
        )
        ids = self.ids
        if ids.grows:
            ids = ExampleIds(len(state["keys"]), state["keys"], grows=True)
        participations: list[int] = []  # of all ranks
        if self._knows_batches:
            participations = (
                [0] * ids.num_examples if ledger is None else ledger.sums["participations"].tolist()
            )
        history = self._empty_history()
        history.grow(ids.num_examples)
        history.load_state_dict(state["history"])
        timeline = Timeline.from_state_dict(
            state["timeline"], history.device if self.ranks is None else self.device
        )

        self._coordinates_of_rows = state["coordinates_of_rows"].clone().to(self.device)
        self.seed = state["seed"]
        if self.ranks is not None:
            take_part(self.ranks, state["ranks"], ledger)
        self.pace.load_state_dict(state["pace"])
        self.not_smooth = list(state["not_smooth"])
        self.ids, self.ledger, self.history, self._whole = ids, ledger, history, None
        self._held = self._waiting = None
        self.timeline = timeline
        if ledger is not None:  # from now on, this run's own draws are predicted
            ledger.draw_rate = self._draw_rate
        if self.persons is not None:
            rate = self.persons.ledger.draw_rate
            self.persons.ledger = Ledger.from_state_dict(state["persons"][0])
            self.persons.ledger.draw_rate = rate
            self.persons.last = state["persons"][1].clone()
        ids.count_from(participations)
        self.clear_batch()
        self.is_updated = True


# ---------------------------------------------------------------- a clip threshold for each example


def weights_by_row(given: ClipWeights | None, ids: ExampleIds) -> Tensor | None:
    """ω of every example in the order of the data set, float64 [n]; None: nobody has one.

    Args:
        given: [n] in that order, or by id; ids that are left out have weight 1.
        ids: The examples' ids.

    Raises:
        ValueError: There is not one weight for each example, or one lies outside (0, 1].
        KeyError: A weight for an id that no example has.

    Example:
        >>> weights_by_row({"b": 0.5}, ExampleIds(3, ["a", "b", "c"]))
        tensor([1.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    if given is None:
        return None
    n = ids.num_examples
    if isinstance(given, Mapping):
        weights = torch.ones(n, dtype=torch.float64)
        weights[ids.rows(given.keys())[1]] = torch.as_tensor(
            list(given.values()), dtype=torch.float64
        )
    else:
        weights = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach().clone()
        if weights.shape != (n,):
            raise ValueError(
                f"clip_weights has shape {list(weights.shape)} for {n} examples; give one for "
                f"each, in the order of the data set, or a dict {{id: weight}} of those that are "
                "not 1"
            )
    check_clip_weights(weights, ids.all())
    return weights


def weights_in_words(weights: Tensor | None) -> str:
    """A text that distinguishes runs with different weights; empty if everybody has 1.

    Example:
        >>> weights_in_words(torch.tensor([1.0, 0.5], dtype=torch.float64))
        'clip_weights below 1 for 1 of 2 examples (SHA-256 7ded32179961d3df)'
    """
    if weights is None or bool((weights == 1).all()):
        return ""
    digest = hashlib.sha256(weights.cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
    return (
        f"clip_weights below 1 for {int((weights < 1).sum())} of {len(weights)} examples "
        f"(SHA-256 {digest})"
    )
