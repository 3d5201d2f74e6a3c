"""What a run whose unit is the row says about persons with several rows.

D of absence, or of a change in all rows: at a step that draws some of a person's k rows, KL_t of the whole person
(:mod:`torchfil.fisher.persons`) divided by 1 − (1−q)^k, the probability of such a step, is added to the person's D. So
the sum over a run is unbiased, as for examples, and for one row it is the same. A row that was not drawn has the
gradients that it had when it was drawn last. If it was never drawn, the worst is assumed: gradients at the clipping
threshold, in opposite directions for a change.

Fisher information: about the coordinates of all rows together, tr I ≤ Σ_r tr I_r, because knowing which of the other
rows were drawn only helps an attacker. A value that all rows share has the sum of the rows' scores, so that for it
sqrt(tr I) ≤ Σ_r sqrt(tr I_r), by Minkowski's inequality.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Ids, Leakage
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.owners import Owners
from torchfil.accounting.quantities import Conditions, Divergence, QuestionSpec
from torchfil.fisher.persons import person_divergence
from torchfil.fisher.results import Estimate, Kind

Questions = Mapping[str, QuestionSpec]
ByRow = Callable[[], Leakage]
PRODUCTS = "products of the questions"  # ‖g̃‖², ‖g̃′‖² and ⟨g̃, g̃′⟩ over C², of each answer, [batch, answers, 3]


class Persons(Leakage):
    """What such a run leaked, by owner: upper bounds, estimated from one run. Its ledger has the divergences alone.

    Args:
        owners: Whose each row is.
        questions: The run's questions by name.
        rows: Returns what the run leaked by row.
        how: How the sums are made.
        most: The largest possible ‖g̃‖/C of each row, [rows]; None: 1.
    """

    def __init__(self, owners: Owners, questions: Questions, rows: ByRow, how: Conditions, most: Tensor | None) -> None:
        super().__init__(Ledger(len(owners), 1, questions=questions), ExampleIds(len(owners), owners.keys), how)
        self.owners, self._by_row = owners, rows
        change = [float(not asked.membership) for asked in questions.values() for _ in asked.answers]
        worst = torch.tensor([(1.0, other, -other) for other in change], dtype=torch.float64).view(-1, 3)
        shares = torch.ones(len(owners.of_row)) if most is None else most.cpu()
        self.last = shares.square()[:, None, None] * worst  # as of each row's last participation, [rows, answers, 3]

    def book(self, rows: Tensor, products: Tensor, noise_multiplier: float, measured: float) -> None:
        """Add a step that drew these rows, [batch], with these ``PRODUCTS``; such steps are measured at this rate."""
        rate, owners, asked = self.conditions.sample_rate, self.owners, self.ledger.questions
        self.last[rows] = products.double().cpu()
        counted = torch.zeros(len(self.last)).index_fill(0, rows, 1.0) if rate is None else torch.ones(len(self.last))
        persons = owners.of_row[rows].unique()
        counts, found = owners.counts[persons], torch.empty(len(persons), self.last.shape[1], dtype=torch.float64)
        for count in counts.unique().tolist():
            own = torch.tensor(owners.rows(persons[counts == count].tolist())).view(-1, count)
            squares = self.last[own] * counted[own][..., None, None] / (noise_multiplier or 1.0) ** 2
            by_answer = squares.permute(3, 0, 2, 1).flatten(1, 2)  # [3, persons · answers, rows]
            found[counts == count] = person_divergence(*by_answer, rate).view(len(own), -1)
        found = found if noise_multiplier else torch.full_like(found, torch.inf)
        if rate is not None:
            found /= -torch.expm1(counts * torch.tensor(-rate, dtype=torch.float64).log1p())[:, None]
        added: dict[str, Tensor] = {}
        for name, part in zip(asked, found.split([len(each.answers) for each in asked.values()], dim=1), strict=True):
            added |= Divergence(name, asked[name]).added(part, measured, skipping=measured < 1)
        self.ledger.add(Contribution(persons, torch.zeros(len(persons)), additions=added))

    def get_trace(self, example_ids: Ids = None) -> Estimate:
        """tr I of these owners, at most: the sum over their rows, [ids]. Its error is not known."""
        return self._summed(self._by_row().get_trace().value, example_ids)

    def get_num_coordinates(self, example_ids: Ids = None) -> Tensor:
        """d of these owners: the sum over their rows, [ids]."""
        return self._summed(self._by_row().get_num_coordinates(), example_ids).value

    def get_attribute_fil(self, example_ids: Ids = None) -> Estimate:
        """sqrt(I_jj) of a value that all rows of an owner share, at most: the sum over the rows, [ids, d]."""
        return self._summed(self._by_row().get_attribute_fil().value, example_ids)

    def _summed(self, values: Tensor, example_ids: Ids) -> Estimate:
        sums = torch.zeros(len(self.owners), *values.shape[1:], dtype=values.dtype)
        value = sums.index_add(0, self.owners.of_row, values.cpu())[self.ids.places(example_ids)]
        return Estimate(value, value * torch.nan, "upper bound", positive=True)

    def _kind(self, rows: Tensor) -> Kind:
        return "upper bound"
