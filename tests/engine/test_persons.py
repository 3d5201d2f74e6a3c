"""Runs whose unit is the row, read by person: divergences, Fisher information and ε of all rows of
a person.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from torch import Tensor
from torch.func import functional_call, grad, vmap

from tests.accounting.by_hand import Step, predicted
from tests.engine.brute_force import Run, make, train
from tests.engine.loops import network
from tests.engine.test_owners import OWNERS, QUESTIONS, visits
from tests.engine.test_state import same
from torchfil.accounting.ledger import Contribution
from torchfil.accounting.persons import absence_divergence
from torchfil.accounting.quantities import question_column
from torchfil.accounting.sums import compared
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.engine.run import Run as EngineRun

KEYS = list(dict.fromkeys(OWNERS.tolist()))
COUNTS = [int((key == OWNERS).sum()) for key in KEYS]
NAME = question_column("member")
SIGMA = 0.9


def by_row(**options: Any) -> Run:
    given = {
        "noise_multiplier": SIGMA,
        "questions": QUESTIONS,
        "owner_of": OWNERS,
        "unit": "row",
        **options,
    }
    return make(network(), visits(), batch_size=7, **given)


def gradients(run: Run, begun: Any, x: Tensor, y: Tensor) -> Tensor:
    """The rows' clipped gradients over σC, [rows, parameters]."""

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(run.plain, parameters, (x[None],)), y[None])

    parts = vmap(grad(loss), in_dims=(None, 0, 0))(begun.weights, x, y)
    g = torch.cat([part.flatten(1) for part in parts.values()], dim=1).detach().cpu()
    clip, limit = get_clip(DEFAULT_CLIP), run.options["max_grad_norm"]
    return g / clip.c(g.norm(dim=1, keepdim=True) / clip.threshold(limit)) / run.noise_std


@pytest.mark.parametrize("how", [{}, {"physical": 2}])
@pytest.mark.parametrize("poisson", [True, False])
def test_divergences_of_persons(poisson: bool, how: dict[str, Any]) -> None:
    """Against predictions by hand from the rows' last gradients; if batches are known, one row has
    the question's own D.
    """
    run = train(by_row(poisson_sampling=poisson, amplification=None), steps=5, **how)
    engine, q = run.engine, run.private.sample_rate if poisson else None
    last = torch.ones(14).double() / SIGMA
    true, log = torch.zeros(6, dtype=torch.float64), list[Step]()
    rate = None if q is None else torch.tensor([1 - (1 - q) ** int(n) for n in COUNTS])
    for passes in run.passes:
        apart, drawn = torch.zeros(6, 1, dtype=torch.float64), torch.zeros(14)
        for begun in passes:
            u, rows = gradients(run, begun, begun.x, begun.y), torch.tensor(begun.ids)
            drawn[rows], last[rows] = 1, u.norm(dim=1)
            owners = torch.tensor([KEYS.index(OWNERS[row]) for row in begun.ids])
            apart = apart.expand(6, u.shape[1]).clone().index_add(0, owners, u)
        persons, found, squares = list[int](), list[float](), list[float]()
        for k, key in enumerate(KEYS):
            if drawn[key == OWNERS].any():
                own = last[key == OWNERS] if poisson else (last * drawn)[key == OWNERS]
                part = 1.0 if rate is None else float(rate[k])
                persons.append(k)
                found.append(absence_divergence(own[None], q).item() / part)
                squares.append(float((SIGMA * last * drawn)[key == OWNERS].square().sum()))
        column = {"value": torch.tensor(found).double()[:, None]}
        released = Contribution(
            torch.tensor(persons), torch.tensor(squares).double(), {NAME: column}
        )
        log.append(Step((released,), noise_multiplier=SIGMA))
        true += apart.square().sum(dim=1) / 2

    examples, _ = predicted(log, 6, rate, NAME, (0,), always=True)
    want = torch.tensor([each.total + each.ahead for each in examples]).double()
    guess, alone = (
        engine.get_guess("member", by="owner"),
        engine.get_guess("member").divergence.value.cpu(),
    )
    torch.testing.assert_close(guess.divergence.value, want, rtol=1e-6, atol=1e-12)
    assert guess.divergence.kind == "estimate"
    assert guess.largest == torch.inf
    if not poisson:
        assert (guess.divergence.value >= true * (1 - 1e-6)).all()
    if not poisson:  # otherwise persons and rows are predicted from their own batches
        single = [key for key in KEYS if (key == OWNERS).sum() == 1]
        rows = [int((key == OWNERS).nonzero()) for key in single]
        found = engine.get_guess("member", single, by="owner").divergence.value
        torch.testing.assert_close(found, alone[rows], rtol=1e-12, atol=1e-12)


def test_a_change_in_all_rows_is_not_read() -> None:
    """Opposite rows have up to three times the D that the mixture on two lines gives, so there is
    no such reading.
    """
    engine = train(by_row(), steps=2).engine
    for name in ("darker", "label"):
        with pytest.raises(ValueError, match="no proven bound: ask Absent"):
            engine.get_guess(name, by="owner")
        assert len(engine.get_guess(name).divergence) == 14  # of single rows
    with pytest.raises(ValueError, match="was not asked 'membr'"):
        engine.get_guess("membr", by="owner")


def test_steps_that_are_not_measured_count_for_persons() -> None:
    """Norms are known at every step, also where Fisher information was skipped or paused."""
    full, part = (train(by_row(fil_rate=rate), steps=5).engine for rate in (1.0, 0.5))
    found, want = (each.get_guess("member", by="owner").divergence.value for each in (part, full))
    torch.testing.assert_close(found, want, rtol=1e-12, atol=0)


def test_ctrl_c_in_a_booking_undoes_what_persons_got(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs is the last ledger to be booked."""
    run = train(by_row(), steps=2)
    before = copy.deepcopy(run.engine.state_dict()["run"])

    def stopped(self: EngineRun, optimizer: Any, *settings: Any) -> None:
        monkeypatch.undo()
        self.book(optimizer, *settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineRun, "book", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(run, steps=3)
    after = run.engine.state_dict()["run"]
    assert same(after["persons"], before["persons"])
    assert same(after["ledger"], before["ledger"])
    assert train(run, steps=4).engine.state_dict()["run"]["ledger"]["steps"] == 4


def test_fisher_information_of_persons() -> None:
    engine = train(by_row(track=("diagonal",)), steps=4).engine
    trace = engine.totals.get_trace().value.cpu()
    own = [trace[key == OWNERS] for key in KEYS]
    total = torch.stack([(part.sum() / (5 * len(part))).sqrt() for part in own])
    attributes = engine.get_attribute_fil().value.cpu().nan_to_num(nan=0.0)
    shared = torch.stack([attributes[key == OWNERS].sum(dim=0) for key in KEYS])
    seen = torch.stack([engine.was_measured().cpu()[key == OWNERS].all() for key in KEYS])
    assert seen.any()
    torch.testing.assert_close(engine.get_fil(by="owner").value[seen], total[seen])
    found = engine.get_attribute_fil(KEYS, by="owner").value
    torch.testing.assert_close(found[seen], shared[seen])
    assert engine.get_fil([KEYS[0]], by="owner").kind == "estimate"


def test_errors_of_persons() -> None:
    """An owner of one row has the row's interval.

    Of several, all probes are off together, draws independently.
    """
    probed = {"track": ("diagonal",), "estimator": "weight-probes", "num_probes": 3}
    run = train(by_row(amplification=None, **probed), steps=30)
    engine = run.engine
    single = [key for key in KEYS if (key == OWNERS).sum() == 1]
    rows = [int((key == OWNERS).nonzero()) for key in single]
    for read in (engine.get_fil, engine.get_attribute_fil):
        of_rows, of_owners = (
            read(ids, **by) for ids, by in ((rows, {}), (single, {"by": "owner"}))
        )
        for name in ("value", "standard_error", "run_error"):
            want, found = getattr(of_rows, name).cpu(), getattr(of_owners, name)
            torch.testing.assert_close(found, want, rtol=1e-6, atol=0)
    ends = [
        torch.stack(engine.get_fil(ids, **by).interval())
        for ids, by in ((rows, {}), (single, {"by": "owner"}))
    ]
    torch.testing.assert_close(ends[1], ends[0].cpu(), rtol=1e-5, atol=0)

    trace, mine = engine.totals.get_trace(), KEYS[0] == OWNERS
    found = engine.get_fil(KEYS[:1], by="owner")
    sums = {name: value.double().cpu() for name, value in engine.ledger.sums.items()}
    draws = sums["participations"]
    assert bool((draws >= 5).all())
    squares = (sums["trace"] / draws).square().sum()  # all examples are one group
    far = (sums["trace_far"] / compared(draws)).sum() / squares
    near = (sums["trace_near"] / (draws - 1)).sum() / squares
    path = (far - near).clamp(min=0) / 4 + near.clamp(min=0) / (2 * draws) + 0.03**2
    batches, measuring = sums["trace_square"], sums["variance"]
    together = (batches + measuring).clamp(min=0).maximum(measuring / 2)
    together += path * sums["trace"].square() - batches.clamp(min=0)
    total = trace.value.cpu()[mine].sum()
    run_error = (batches.clamp(min=0)[mine].sum() + together[mine].sqrt().sum().square()).sqrt()
    slope = 1 / (2 * (total * 5 * mine.sum()).sqrt())  # of sqrt(tr/d)
    torch.testing.assert_close(
        found.standard_error[0], slope * trace.standard_error.cpu()[mine].sum()
    )
    torch.testing.assert_close(found.run_error[0], slope * run_error, rtol=1e-6, atol=0)
    assert found.standard_error[0] > 0
    assert 0 < found.interval()[0] < found.value < found.interval()[1] < torch.inf
    high = engine.get_guess("member", by="owner").divergence.interval()[1]  # of norms alone
    assert bool(high.isfinite().all())


def test_epsilon_of_persons() -> None:
    run = train(by_row(), steps=4)
    rdp = RDPAccountant()
    rdp.history = list(run.engine.accountant.history)
    assert run.engine.get_epsilon(1e-5, by="owner") > 3 * rdp.get_epsilon(1e-5)  # six rows
    alone = train(by_row(owner_of=torch.arange(14)), steps=4).engine
    assert alone.get_epsilon(1e-5, by="owner") == pytest.approx(rdp.get_epsilon(1e-5), rel=1e-6)
    assert by_row().engine.get_epsilon(1e-5, by="owner") == 0
    with pytest.warns(UserWarning, match="no privacy"):
        open_run = train(by_row(noise_multiplier=0.0), steps=2).engine
    assert open_run.get_epsilon(1e-5, by="owner") == torch.inf
    assert open_run.get_guess("member", by="owner").divergence.value.max() == torch.inf


def test_checkpoints_and_refusals() -> None:
    run = train(by_row(), steps=3)
    state = copy.deepcopy(run.engine.state_dict())
    other = by_row()
    other.engine.load_state_dict(state)
    persons, loaded = (each.engine._training.run.persons for each in (run, other))
    assert torch.equal(persons.last, loaded.last)
    want = run.engine.get_guess("member", by="owner").divergence.value
    assert torch.equal(other.engine.get_guess("member", by="owner").divergence.value, want)

    # no step is needed to refuse
    engine = make(network(), visits(), batch_size=7, noise_multiplier=SIGMA).engine
    for read in (engine.get_epsilon, engine.get_fil, engine.get_guess):
        with pytest.raises(ValueError, match="owner_of="):
            read(1e-5, by="owner")
    whole = train(by_row(unit="owner"), steps=2).engine  # the examples are owners already
    found, own = whole.get_fil(by="owner").value, whole.get_fil().value
    torch.testing.assert_close(found, own, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match="pass owner_of="):
        make(network(), visits(), batch_size=7, id_of=OWNERS.tolist())
