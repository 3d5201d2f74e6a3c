"""People with several rows: a person's gradient is clipped once.

The ledger is that of brute force over its rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, jacrev
from torch.utils.data import TensorDataset

from tests.accounting.by_hand import Step, logged, sums_by_hand
from tests.cases import DEVICE, relative_error
from tests.engine.brute_force import (
    Run,
    as_read,
    assert_released,
    make,
    plain_kernels,
    specs,
    train,
)
from tests.engine.loops import data, network
from tests.engine.ways import LOSS
from torchfil import Private
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.quantities import question_column
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.fisher import reference
from torchfil.fisher.mechanism import step_divergence
from torchfil.questions import Absent, Change, Label

# six people, with one to six rows
OWNERS = torch.tensor([3, 1, 1, 0, 3, 2, 1, 4, 1, 0, 5, 1, 1, 3])
SHARED = [0, 3]  # columns that are the same in all rows of a person
QUESTIONS = {
    "member": Absent(),
    "darker": Change(lambda x, y: (0.5 * x, y)),
    "label": Label(3),
}


def visits() -> TensorDataset:
    """Rows of five numbers; two of them belong to the person."""
    x, y = data(len(OWNERS)).tensors
    x = x.clone()
    x[:, SHARED] = torch.randn(6, 2, generator=torch.Generator().manual_seed(1), dtype=x.dtype)[
        OWNERS
    ]
    return TensorDataset(x, y)


class Truth:
    """Sums over a run by jacrev of a person's clipped gradient, in float64, predicted and corrected
    by hand.

    Persons in the order of their first rows.

    Attributes:
        fim: [persons, d, d], with room for six rows of each, then what they share.
        trace: [persons].
        divergences: By question, [persons, answers], as they are read.
        sums: Σ g̃ of every step.
        seen: The rows that each person has brought.
    """

    def __init__(self, run: Run, shared: bool = False, reduction: str = "mean") -> None:
        keys = list(dict.fromkeys(OWNERS.tolist()))
        own = [column for column in range(5) if not (shared and column in SHARED)]
        room = int(OWNERS.bincount().max())
        d, s, q = room * len(own) + (5 - len(own)), run.noise_std, run.private.sample_rate
        q = q if run.options.get("amplification") is None and q is not None else None
        log = list[Step]()
        self.sums, self.seen = list[Tensor](), [set[int]() for _ in keys]
        clip, limit = get_clip(DEFAULT_CLIP), run.options["max_grad_norm"]
        weights = run.options.get("clip_weights", torch.ones(len(keys)))

        for passes, released in zip(run.passes, run.released, strict=True):
            total, batches = torch.zeros_like(released), list[Contribution]()
            for begun in passes:
                for person in dict.fromkeys(OWNERS[begun.ids].tolist()):
                    chosen = [
                        place for place, row in enumerate(begun.ids) if int(OWNERS[row]) == person
                    ]
                    k, rows = keys.index(person), (person == OWNERS).nonzero().flatten().tolist()
                    numbers = [rows.index(begun.ids[place]) for place in chosen]
                    self.seen[k] |= set(numbers)
                    x, y = begun.x[chosen], begun.y[chosen]

                    def clipped(x: Tensor, y: Tensor, k: int = k, begun: Any = begun) -> Tensor:
                        def loss(parameters: dict[str, Tensor]) -> Tensor:
                            return F.cross_entropy(
                                functional_call(run.plain, parameters, (x,)), y, reduction=reduction
                            )

                        g = torch.cat(
                            [part.flatten() for part in grad(loss)(begun.weights).values()]
                        )
                        return float(weights[k]) * g / clip.c(g.norm() / clip.threshold(limit))

                    def placed(z: Tensor, x: Tensor = x, numbers: Any = numbers) -> Tensor:
                        by_row = z[: room * len(own)].reshape(room, len(own))
                        x = x.index_copy(1, torch.tensor(own, device=x.device), by_row[numbers])
                        common = z[room * len(own) :].expand(len(x), -1)
                        return (
                            x.index_copy(1, torch.tensor(SHARED, device=x.device), common)
                            if shared
                            else x
                        )

                    z = torch.zeros(d, dtype=x.dtype, device=x.device)
                    z[: room * len(own)].reshape(room, len(own))[numbers] = x[:, own]
                    if shared:
                        z[room * len(own) :] = x[0, SHARED]
                    with plain_kernels():
                        jacobian = jacrev(lambda z: clipped(placed(z), y))(z)  # noqa: B023
                        g = clipped(x, y).detach()
                        others = {name: ask.alternatives(x, y) for name, ask in QUESTIONS.items()}
                        moved = {
                            name: [
                                torch.zeros_like(g)
                                if each is None
                                else clipped(each.inputs, each.targets)
                                for each in of
                            ]
                            for name, of in others.items()
                        }
                    one = jacobian[None], g[None]
                    fim = (
                        one[0].mT @ one[0] / s**2
                        if q is None
                        else reference.poisson_fim(*one, s, q)
                    )
                    trace = fim.diagonal(dim1=1, dim2=2).sum(dim=1)
                    columns = {"trace": trace, "fim": fim}
                    for name, alternatives in moved.items():
                        found = []
                        for v in alternatives:
                            products = [
                                (a * b).sum()[None] / s**2 for a, b in ((g, g), (v, v), (g, v))
                            ]
                            found.append(step_divergence(*products, q) / (q or 1))
                        columns[question_column(name)] = torch.stack(found, dim=1)
                    told = {name: {"value": each.detach().cpu()} for name, each in columns.items()}
                    square = g.square().sum()[None].cpu()
                    batches.append(Contribution(torch.tensor([k]), square, told))
                    total += g
            self.sums.append(total)
            log.append(Step(batches, run.options["noise_multiplier"]))

        like = Ledger(len(keys), d, track=("fim",), questions=specs(QUESTIONS), draw_rate=q)
        sums, ledger = sums_by_hand(like, log), run.engine.ledger
        self.fim, self.trace = sums["fim"], sums["trace"]
        self.divergences = {name: as_read(ledger, log, name, sums)[1] for name in QUESTIONS}


RUNS: list[Any] = [
    ({}, {}, "auto"),
    ({"criterion": LOSS}, {}, "train_step"),
    ({"rows_per_owner": 2}, {}, "auto"),
    (
        {"row_reduction": "sum", "clip_weights": torch.linspace(0.3, 1, 6).double()},
        {"physical": 2},
        "auto",
    ),
    ({"private": Private(shared={0: SHARED}), "criterion": LOSS}, {}, "train_step"),
    ({"private": Private(shared={0: SHARED}), "rows_per_owner": 3}, {"physical": 1}, "auto"),
    ({"poisson_sampling": False}, {}, "auto"),
    ({"accumulation_steps": 2, "rows_per_owner": 2}, {"every": 2}, "auto"),
    (
        {"grad_sample_mode": "ghost", "clip": DEFAULT_CLIP, "loading": {"num_workers": 2}},
        {},
        "auto",
    ),
    # rows of a person, a few at a time
    pytest.param(
        {"private": Private(shared={0: SHARED}), "max_memory": 4096},
        {},
        "auto",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("options", "how", "way"), RUNS)
def test_the_ledger_is_the_truth(options: dict[str, Any], how: dict[str, Any], way: str) -> None:
    given = {
        "noise_multiplier": 0.9,
        "amplification": None,
        "track": ("fim",),
        "questions": QUESTIONS,
        **options,
    }
    run = train(
        make(network(), visits(), batch_size=7, owner_of=OWNERS, **given), steps=4, way=way, **how
    )
    shared, engine = "private" in options, run.engine
    truth = Truth(run, shared, options.get("row_reduction", "mean"))
    assert_released(run, truth.sums)
    ledger = engine.ledger
    assert ledger.num_examples == 6
    if options.get("poisson_sampling", True):  # Opacus's, as of examples that are people
        drawn_at = pytest.approx(run.private.sample_rate)
        assert engine.accountant.history == [(0.9, drawn_at, ledger.steps)]
    assert relative_error(ledger.sums["fim"], truth.fim) < 5e-6
    own = torch.tensor(
        [len(seen) * (3 if shared else 5) + 2 * (shared and bool(seen)) for seen in truth.seen]
    )
    assert torch.equal(ledger.sums["num_coordinates"].cpu().long(), own)
    told, fil = engine.was_measured().cpu(), engine.get_fil().value.cpu()
    assert torch.equal(told, (own > 0) & (truth.trace > 0))
    assert torch.equal(fil.isnan(), ~told)
    assert relative_error(fil[told], (truth.trace / own)[told].sqrt()) < 5e-6
    by_row = (
        truth.fim.diagonal(dim1=1, dim2=2)[:, : 6 * (3 if shared else 5)]
        .unflatten(1, (6, -1))
        .mean(dim=2)
        .clamp(min=0)
        .sqrt()
    )
    people = torch.tensor(
        [list(dict.fromkeys(OWNERS.tolist())).index(owner) for owner in OWNERS.tolist()]
    )
    numbers = torch.tensor(
        [int((OWNERS[:row] == owner).sum()) for row, owner in enumerate(OWNERS.tolist())]
    )
    assert relative_error(engine.get_fil(by="row").value, by_row[people, numbers]) < 5e-6
    for name, divergences in truth.divergences.items():
        value = engine.get_guess(name).divergence.value.reshape(divergences.shape)
        assert relative_error(value, divergences) < 5e-6, name


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"owner_of": OWNERS[:3]}, "3 rows.*14"),
    ({"owner_of": [None, *OWNERS.tolist()[1:]]}, "row 0 has no owner"),
    ({"owner_of": [(1, 2), *OWNERS.tolist()[1:]]}, "row 0 has several owners"),
    ({"owner_of": "patient"}, "patient"),
    ({"owner_of": OWNERS, "unit": "person"}, "unit='person'"),
    ({"owner_of": OWNERS, "views": 2, "criterion": LOSS}, "views="),
    ({"owner_of": OWNERS, "grad_sample_mode": "hooks"}, "grad_sample_mode='auto'"),
    ({"rows_per_owner": 2}, "owner_of="),
    ({"owner_of": OWNERS, "rows_per_owner": 0}, "rows_per_owner=0"),
]


@pytest.mark.parametrize(("options", "says"), REFUSED)
def test_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make(network(), visits(), **options)


def test_rows_that_should_share_and_do_not() -> None:
    run = make(network(), visits(), batch_size=7, owner_of=OWNERS, private=Private(shared=0))
    with pytest.raises(ValueError, match="different values of 0"):
        train(run, steps=4)


def test_divergences_are_those_of_simulated_transcripts() -> None:
    """With constant weights D is the mean log likelihood ratio: a person absent, and all of its
    rows changed.
    """
    q, steps, s, count = 0.5, 6, 0.9 * 0.5, 40_000
    options = {
        "noise_multiplier": 0.9,
        "amplification": None,
        "sample_rate": q,
        "learning_rate": 0.0,
        "clip": "hard",
    }
    with logged() as log:
        run = train(
            make(network(), visits(), owner_of=OWNERS, questions=QUESTIONS, **options), steps=4
        )
    person, drawn = 1, OWNERS.eq(1)  # six rows
    x, y = (part[drawn].to(DEVICE) for part in visits().tensors)

    def clipped(x: Tensor) -> Tensor:
        run.plain.zero_grad()
        F.cross_entropy(run.plain(x), y).backward()
        g = torch.cat([p.grad.flatten() for p in run.plain.parameters()])
        return g * min(1.0, 0.5 / float(g.norm()))

    generator = torch.Generator(DEVICE).manual_seed(0)
    u = clipped(x) / s
    takes_part = torch.rand(count, steps, 1, generator=generator, device=DEVICE) < q
    released = takes_part * u + torch.randn(
        count, steps, len(u), generator=generator, dtype=u.dtype, device=DEVICE
    )

    def log_density(v: Tensor) -> Tensor:  # relative to the noise alone
        return torch.log(1 - q + q * (released @ v - v.square().sum() / 2).exp()).sum(dim=1)

    batches = [batch for step in log for batch in step.contributions]
    measured = next(batch for batch in batches if person in batch.rows)
    place = measured.rows.tolist().index(person)
    for name, v in (("member", torch.zeros_like(u)), ("darker", clipped(0.5 * x) / s)):
        ratios = log_density(u) - log_density(v)
        step = q * measured.columns[question_column(name)]["value"][place].item()
        assert abs(steps * step - float(ratios.mean())) < 3 * float(ratios.std()) / count**0.5, name
