"""What a run whose unit is the row says about persons with several rows.

D of absence, or of a change in all rows: at a step that draws some of a person's k rows, KL_t of the whole person
(:mod:`torchfil.fisher.persons`) divided by 1 − (1−q)^k, the probability of such a step, is added to the person's D. So
the sum over a run is unbiased, as for examples, and for one row it is the same. A row that was not drawn has the
gradients that it had when it was drawn last. If it was never drawn, the worst is assumed: gradients at the clipping
threshold, in opposite directions for a change.

Fisher information: that about the coordinates of all rows, which are disjoint, is at most Σ_r I_r in its trace, because
knowing which of the other rows were drawn only helps an attacker. A value that all rows share has the sum of the rows'
scores, so that tr I ≤ (Σ_r sqrt(tr I_r))², by Minkowski's inequality.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Ids, Leakage
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.owners import Owners
from torchfil.accounting.quantities import Conditions, Divergence, QuestionSpec
from torchfil.fisher.persons import person_divergence
from torchfil.fisher.results import Estimate
from torchfil.guessing import Guess

PRODUCTS = "products of the questions"  # ‖g̃‖², ‖g̃′‖² and ⟨g̃, g̃′⟩ over C², of each answer, [batch, answers, 3]


class Persons:
    """The divergences of a run's questions by owner, and other readings by owner.

    Args:
        owners: Whose each row is.
        questions: The run's questions by name.
        most: The largest possible ‖g̃‖/C of each row, [rows]; None: 1.
        rate: q of secret draws; None: the attacker knows which rows are in a batch.
    """

    def __init__(
        self, owners: Owners, questions: Mapping[str, QuestionSpec], most: Tensor | None, rate: float | None
    ) -> None:
        self.owners, self.ledger, self.rate = owners, Ledger(len(owners), 1, questions=questions), rate
        change = [float(not asked.membership) for asked in questions.values() for _ in asked.answers]
        worst = torch.tensor([(1.0, other, -other) for other in change], dtype=torch.float64).view(-1, 3)
        shares = torch.ones(len(owners.of_row)) if most is None else most.cpu()
        self.last = shares.square()[:, None, None] * worst  # as of each row's last participation, [rows, answers, 3]

    def book(self, rows: Tensor, products: Tensor, noise_multiplier: float, measured: float) -> None:
        """Add a step that drew these rows, [batch], with these ``PRODUCTS``; such steps are measured at this rate."""
        self.last[rows] = products.double().cpu()
        drawn, owners = torch.zeros(len(self.last), dtype=torch.bool).index_fill(0, rows, True), self.owners
        persons = owners.of_row[rows].unique()
        counts, found = owners.counts[persons], torch.empty(len(persons), self.last.shape[1], dtype=torch.float64)
        for count in counts.unique().tolist():
            own = torch.tensor(owners.rows(persons[counts == count].tolist())).view(-1, count)
            known = self.last[own] if self.rate is not None else self.last[own] * drawn[own][..., None, None]
            squares = (known / (noise_multiplier or 1.0) ** 2).permute(3, 0, 2, 1)  # [3, persons, answers, rows]
            found[counts == count] = person_divergence(*squares.flatten(1, 2), self.rate).view(len(own), -1)
        if noise_multiplier == 0:
            found.fill_(torch.inf)
        if self.rate is not None:
            found /= -torch.expm1(counts * torch.tensor(-self.rate, dtype=torch.float64).log1p())[:, None]
        asked, added = self.ledger.questions, {}
        by_question = found.split([len(each.answers) for each in asked.values()], dim=1)
        for name, part in zip(asked, by_question, strict=True):
            added |= Divergence(name, asked[name]).added(part, measured, skipping=measured < 1)
        self.ledger.add(Contribution(persons, torch.zeros(len(persons)), additions=added))

    def get_guess(self, question: str, owner_ids: Ids, *, skipping: bool) -> Guess:
        """D of these owners, an upper bound; ``skipping``: whether steps are left out at random."""
        conditions = Conditions(sample_rate=self.rate, skipping=skipping)
        guess = Leakage(self.ledger, self._ids, conditions).get_guess(question, owner_ids)
        return replace(guess, divergence=replace(guess.divergence, kind="upper bound"))

    def get_fil(self, rows: Leakage, owner_ids: Ids, *, shared: bool) -> Estimate:
        """sqrt(tr(I)/d) over all rows of these owners, an upper bound, from what is known about the rows."""
        power, d = 2 if shared else 1, rows.get_num_coordinates().cpu()
        trace = torch.bincount(self.owners.of_row, rows.get_trace().value.cpu() ** (1 / power)) ** power
        size = torch.bincount(self.owners.of_row, d) / (self.owners.counts if shared else 1)
        value = (trace / size).sqrt()[self._ids.places(owner_ids)]
        return Estimate(value, torch.full_like(value, torch.nan), "upper bound", positive=True)

    @property
    def _ids(self) -> ExampleIds:
        return ExampleIds(len(self.owners), self.owners.keys)

    def state_dict(self) -> dict[str, Any]:
        """Sums and last known gradients."""
        return {"ledger": self.ledger.state_dict(), "last": self.last.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.ledger, self.last = Ledger.from_state_dict(state["ledger"]), state["last"].clone()
