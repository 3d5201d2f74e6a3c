"""Runs whose unit is the row, read by person: divergences, Fisher information and ε of all rows of a person."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

from tests.accounting.test_persons import aligned
from tests.engine.brute_force import Run, make, train
from tests.engine.loops import data, network
from tests.engine.test_owners import OWNERS, QUESTIONS, visits
from torchfil.accounting.persons import person_divergence
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.questions import Absent

KEYS = list(dict.fromkeys(OWNERS.tolist()))
SIGMA = 0.9


def by_row(**options: Any) -> Run:
    given = {"noise_multiplier": SIGMA, "questions": QUESTIONS, "owner_of": OWNERS, "unit": "row", **options}
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
    """Against the same sums over the rows' last gradients; one row has the question's own D."""
    run = train(by_row(poisson_sampling=poisson, amplification=None), steps=5, **how)
    engine, q = run.engine, run.private.sample_rate if poisson else None
    for name, question in QUESTIONS.items():
        answers = len(question.answers)
        last = (
            torch.tensor([1.0, 0, 0] if name == "member" else [1.0, 1, -1]).repeat(14, answers, 1).double() / SIGMA**2
        )
        want, true = torch.zeros(2, 6, answers, dtype=torch.float64)
        for passes in run.passes:
            apart = torch.zeros(6, answers, 1, dtype=torch.float64)
            drawn = torch.zeros(14, 1, 1)
            for begun in passes:
                u, rows = gradients(run, begun, begun.x, begun.y), torch.tensor(begun.ids)
                drawn[rows] = 1
                for k, other in enumerate(question.alternatives(begun.x, begun.y)):
                    v = 0 * u if other is None else gradients(run, begun, other.inputs, other.targets)
                    last[rows, k] = torch.stack([(u * u).sum(1), (v * v).sum(1), (u * v).sum(1)], dim=1)
                    apart = apart.expand(6, answers, u.shape[1]).clone()
                    apart[:, k].index_add_(0, torch.tensor([KEYS.index(OWNERS[row]) for row in begun.ids]), u - v)
            for k, key in enumerate(KEYS):
                if drawn[key == OWNERS].any():
                    own = last[key == OWNERS] if poisson else (last * drawn)[key == OWNERS]
                    chance = 1 - (1 - q) ** len(own) if q else 1
                    want[k] += person_divergence(*own.permute(2, 1, 0), q) / chance
            true += apart.square().sum(dim=2) / 2

        guess, alone = engine.get_guess(name, by="owner"), engine.get_guess(name).divergence.value.cpu()
        value = guess.divergence.value.reshape(6, answers)
        torch.testing.assert_close(value, want, rtol=1e-6, atol=1e-12)
        assert guess.divergence.kind == "upper bound"
        assert guess.largest == torch.inf
        if not poisson:
            assert (value >= true * (1 - 1e-6)).all()
        single = [key for key in KEYS if (key == OWNERS).sum() == 1]
        rows = [int((key == OWNERS).nonzero()) for key in single]
        found = engine.get_guess(name, single, by="owner").divergence.value
        torch.testing.assert_close(found, alone[rows], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 12])
def test_a_person_with_aligned_rows(rows: int) -> None:
    """At the threshold and with constant weights, every step in which the person is drawn adds the true KL/P(drawn)."""
    x, y = data(24).tensors
    x[:rows] = x[0]
    y[:rows] = y[0]
    persons = [0] * rows + list(range(1, 25 - rows))
    options = {"owner_of": persons, "unit": "row", "questions": {"member": Absent()}, "clip": "hard"}
    options |= {"amplification": None, "learning_rate": 0.0}
    made = make(network(), TensorDataset(x, y), batch_size=4, max_grad_norm=1e-3, noise_multiplier=1.5, **options)
    run = train(made, steps=12)
    q, found = run.private.sample_rate, run.engine.get_guess("member", by="owner").divergence.value[0].item()
    steps = sum(any(row < rows for begun in passes for row in begun.ids) for passes in run.passes)
    true = steps * aligned(1 / 1.5, 0.0, 0.0, rows, q) / (1 - (1 - q) ** rows)
    assert true * (1 - 1e-6) <= found <= 2 * true
    assert steps > 0


def test_fisher_information_of_persons() -> None:
    engine = train(by_row(track=("diagonal",)), steps=4).engine
    trace = engine.totals.get_trace().value.cpu()
    own = [trace[key == OWNERS] for key in KEYS]
    total = torch.stack([(part.sum() / (5 * len(part))).sqrt() for part in own])
    attributes = engine.get_attribute_fil().value.cpu()
    shared = torch.stack([attributes[key == OWNERS].sum(dim=0) for key in KEYS])
    seen = torch.stack([engine.was_measured().cpu()[key == OWNERS].all() for key in KEYS])
    assert seen.any()
    torch.testing.assert_close(engine.get_fil(by="owner").value[seen], total[seen])
    torch.testing.assert_close(engine.get_attribute_fil(KEYS, by="owner").value, shared)
    assert engine.get_fil([KEYS[0]], by="owner").kind == "upper bound"


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
    for name in QUESTIONS:
        want = run.engine.get_guess(name, by="owner").divergence.value
        assert torch.equal(other.engine.get_guess(name, by="owner").divergence.value, want)

    engine = train(make(network(), visits(), batch_size=7, noise_multiplier=SIGMA), steps=1).engine
    for read in (engine.get_epsilon, engine.get_fil, engine.get_guess):
        with pytest.raises(ValueError, match="owner_of="):
            read(1e-5, by="owner")
    with pytest.raises(ValueError, match="must be 'owner'"):
        engine.get_fil(by="visit")
    whole = train(by_row(unit="owner"), steps=2).engine  # the examples are owners already
    assert torch.equal(whole.get_fil(by="owner").value, whole.get_fil().value)
    with pytest.raises(ValueError, match="pass owner_of="):
        make(network(), visits(), batch_size=7, id_of=OWNERS.tolist())
