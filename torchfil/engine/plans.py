"""Which pass serves a kind of examples: one trial each, and what later passes have shown."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import replace

import torch

from torchfil.engine.replica import Replica
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.recording import Plan, plan
from torchfil.fisher.recording.plan import NOT_FINITE
from torchfil.utils.trees import form_of, tensors_of

logger = logging.getLogger(__name__)

_MOST_PLANS = 256
_LENGTHS_TO_TRY = 4  # of texts of which others lie between
_ROWS_TO_TRY = 64  # of an owner


class Plans:
    """Trials of the recorded pass, one for every kind of examples.

    Args:
        replica: The model.
        recorded: Whether recorded passes may be used; not if each parameter's gradient is clipped
            separately.
    """

    def __init__(self, replica: Replica, *, recorded: bool = True) -> None:
        self.replica, self._recorded_wanted = replica, recorded
        self._plans: dict[Hashable, Plan] = {}
        # by all except lengths, then by coordinates
        self._fitting: dict[Hashable, dict[int, Plan]] = {}
        self._not_live: set[Hashable] = set()

    def known(self, gradients: ExampleGradients) -> Plan | None:
        """The plan of such examples; None: not tried yet."""
        found = self._plans.get(self._key(gradients))
        return None if found is None else _of_rows(found, gradients.examples.num_rows)

    def of(self, gradients: ExampleGradients) -> Plan:
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
        # one example cannot show whether examples mix, and the next batch may be finite
        if len(gradients) > 1 and found.reason != NOT_FINITE:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
                self._fitting.clear()
            self._plans[key] = found
            if found.fits:
                fitting[gradients.num_coordinates // tried] = found
            _log_plan(found, gradients.autocast)
        return _of_rows(found, rows)

    def refuse(self, gradients: ExampleGradients, tried: Plan, reason: str) -> None:
        """From now on, map over such examples."""
        found = Plan(reason, 0, facts=tried.facts)
        self._plans[self._key(gradients)] = found
        _log_plan(found, gradients.autocast)

    def serves_live(self, gradients: ExampleGradients) -> bool:
        """Whether the loop's own pass over such examples can be finished, as far as is known."""
        return not self.replica.written and self._key(gradients) not in self._not_live

    def refuse_live(self, gradients: ExampleGradients) -> None:
        """From now on, run another pass than the loop's over such examples."""
        self._not_live.add(self._key(gradients))

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
