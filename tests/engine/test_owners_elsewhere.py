"""People with several rows meet the rest: estimators, checkpoints, averages, samplers, readings,
run files.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from tests.cases import DEVICE, relative_error
from tests.engine.brute_force import Run, make, train
from tests.engine.loops import data, network
from tests.engine.test_owners import OWNERS, QUESTIONS, SHARED, visits
from torchfil import FILPrivacyEngine, Private
from torchfil.accounting.norms import NormHistory
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.gate import gate
from torchfil.gate.pipelines import sarif
from torchfil.gate.policy import parse_policy
from torchfil.report import load, write_report
from torchfil.report.card import card_of

NAMES = [f"p{owner}" for owner in OWNERS.tolist()]
OTHERS = [NAMES[0], NAMES[0], *NAMES[2:]]  # the second row is that of somebody else


def made(dataset: Any = None, **options: Any) -> Run:
    dataset = visits() if dataset is None else dataset
    given = {
        "owner_of": NAMES,
        "noise_multiplier": 0.9,
        "criterion": nn.CrossEntropyLoss(),
        **options,
    }
    return make(network(), dataset, batch_size=7, **given)


ESTIMATORS: list[dict[str, Any]] = [
    {"estimator": "weight-probes", "num_probes": 2},
    {"estimator": "weight-probes", "fil_rate": 0.5, "track": ("diagonal", "plis")},
    {"estimator": "weight-probes", "rel_error": 0.1, "rows_per_owner": 2},
    {"estimator": "weight-probes", "private": Private(shared={0: SHARED}), "clipping": "per_layer"},
]


@pytest.mark.parametrize("options", ESTIMATORS)
def test_estimates_are_those_of_the_exact_trace(options: dict[str, Any]) -> None:
    layers = {"max_grad_norm": [0.3] * 4} if "clipping" in options else {}
    steps = 40 if "fil_rate" in options else 12
    found, exact = (
        train(made(**{**options, **layers, **more}), steps=steps).engine.totals.get_trace()
        for more in (
            {},
            {
                "estimator": "exact",
                "track": (),
                "fil_rate": 1.0,
                "rel_error": None,
            },
        )
    )
    error = found.value.sum() - exact.value.sum()
    spread = found.standard_error.square().sum().sqrt()
    # a skipped step is skipped for all of its examples: their errors are alike
    if "fil_rate" in options:
        spread = found.standard_error.sum()
    assert abs(float(error)) < 3 * float(spread)


@pytest.mark.parametrize("rows_per_owner", [None, 2])
def test_a_resumed_run_is_the_uninterrupted_one(rows_per_owner: int | None, tmp_path: Path) -> None:
    """With the numbers of coordinates of all rows that a person has brought.

    Other owners are refused.
    """
    options = {"rows_per_owner": rows_per_owner, "track": ("diagonal",), "norm_refresh": 2}
    first, second = made(**options), made(**options)
    train(first, steps=4)
    first.engine.save_checkpoint(
        path=tmp_path / "run", module=first.module, optimizer=first.optimizer
    )
    state = torch.get_rng_state()
    train(first, steps=8)
    second.engine.load_checkpoint(
        path=tmp_path / "run", module=second.module, optimizer=second.optimizer
    )
    torch.set_rng_state(state)
    train(second, steps=4)
    sums = second.engine.ledger.sums
    for name, value in first.engine.ledger.sums.items():
        assert torch.equal(value, sums[name]), name
    for different in ({"owner_of": OTHERS}, {"rows_per_owner": 3}, {"row_reduction": "sum"}):
        other = made(**{**options, **different})
        with pytest.raises(ValueError, match="rows=.*instead of.*Nothing was loaded"):
            other.engine.load_state_dict(first.engine.state_dict())
        with pytest.raises(ValueError, match="must share"):
            FILPrivacyEngine.merge([first.engine, train(other, steps=8).engine])


def test_readings_at_the_current_weights_are_by_person() -> None:
    """Norms of everybody, and PLIS in the order of the ids, whatever the order of the passes."""
    run = train(made(max_grad_norm=3.0), steps=3)
    ratios = torch.zeros(6).double()
    with mock.patch.object(
        NormHistory, "set_ratios", lambda _, rows, ratio: ratios.index_copy_(0, rows, ratio.cpu())
    ):
        run.engine.refresh_norms()
    names, (x, y), clip = list(dict.fromkeys(NAMES)), visits().tensors, get_clip(DEFAULT_CLIP)
    plis, twice = run.engine.plis(), run.engine.plis([names[1], names[4], names[1]])
    for place, name in enumerate(names):
        rows = [row for row, own in enumerate(NAMES) if own == name]

        def clipped(x: Tensor, rows: list[int] = rows) -> Tensor:
            loss = F.cross_entropy(run.module(x), y[rows].to(DEVICE))
            parts = torch.autograd.grad(loss, [*run.module.parameters()], create_graph=True)
            norm = torch.cat([part.flatten() for part in parts]).norm()
            return norm / clip.c(norm / clip.threshold(3.0))

        at = x[rows].to(DEVICE).requires_grad_()
        assert float(ratios[place]) == pytest.approx(float(clipped(at)) / 3, rel=1e-5)
        slopes = torch.autograd.grad((clipped(at) / run.noise_std).square(), at)[0]
        assert relative_error(plis[place, : len(rows)], slopes) < 1e-5
        assert plis[place, len(rows) :].isnan().all()
    torch.testing.assert_close(twice[:, :6], plis[[1, 4, 1]], equal_nan=True)


def test_samplers_that_choose_rows_are_refused() -> None:
    chosen: list[dict[str, Any]] = [
        {"sampler": SubsetRandomSampler(range(9)), "batch_size": 4},
        {"batch_sampler": [[0, 1], [2]]},
    ]
    for how in chosen:
        module = network()
        optimizer, loader = (
            torch.optim.SGD(module.parameters(), lr=0.1),
            DataLoader(visits(), **how),
        )
        given = {
            "noise_multiplier": 1.0,
            "max_grad_norm": 1.0,
            "poisson_sampling": False,
            "owner_of": NAMES,
        }
        with pytest.raises(ValueError, match="chooses rows, and owners are drawn"):
            FILPrivacyEngine().make_private(module, optimizer, loader, **given)


@pytest.mark.parametrize("way", ["auto", "train_step"])
def test_a_person_with_many_rows_among_people_with_one(way: str) -> None:
    """Who is drawn alone, or with others, or when nobody else is, adds what brute force adds."""
    owners = torch.cat([torch.zeros(300).long(), torch.arange(12)])
    run = train(made(data(312), owner_of=owners, sample_rate=0.1), steps=16, way=way)
    assert {0, 1} <= {len(owners[step[0].ids].unique()) for step in run.passes}
    assert max(len(step[0].ids) for step in run.passes) > 300
    clip, limit, whole = (
        get_clip(DEFAULT_CLIP),
        run.options["max_grad_norm"],
        (owners == 0).nonzero().flatten(),
    )
    for (begun,), released in zip(run.passes, run.released, strict=True):
        total, model = torch.zeros_like(released), copy.deepcopy(run.plain)
        model.load_state_dict(begun.weights)
        drawn = owners[begun.ids]
        for owner in drawn.unique():
            own = drawn == owner
            assert int(own.sum()) == (len(whole) if owner == 0 else 1)
            loss = F.cross_entropy(model(begun.x[own]), begun.y[own])
            g = torch.cat(
                [part.flatten() for part in torch.autograd.grad(loss, [*model.parameters()])]
            )
            total += g / clip.c(g.norm() / clip.threshold(limit))
        assert float((released - total).norm()) < 1e-6 * max(1.0, float(total.norm()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"track": ("diagonal",)},
        {"rows_per_owner": 2},
        {"private": Private(shared={0: SHARED}), "track": ("diagonal",)},
    ],
)
def test_a_saved_run_of_people(options: dict[str, Any], tmp_path: Path) -> None:
    run = train(made(questions=QUESTIONS, clip_weights={"p4": 0.5}, **options), steps=4)
    engine = run.engine
    groups = {"kind": {name: "even" if int(name[1:]) % 2 == 0 else "odd" for name in NAMES}}
    saved = load(engine.save_run(tmp_path / "run.parquet", delta=1e-5, groups=groups))
    assert saved.ids.tolist() == list(dict.fromkeys(NAMES))
    fil = torch.as_tensor(saved.columns["fil"]), engine.get_fil().value.cpu()
    torch.testing.assert_close(*fil, rtol=1e-6, atol=0, equal_nan=True)
    assert saved.columns["clip_weight"].tolist() == [
        0.5 if name == "p4" else 1.0 for name in saved.ids
    ]
    # rows that nobody has brought yet have no d
    assert (saved.baselines is None) == ("rows_per_owner" in options)
    write_report(saved, tmp_path / "page")
    assert gate.check(saved, gate.default_policy(saved))


@pytest.fixture(scope="module")
def by_patient() -> Any:
    private, names = Private(shared={0: SHARED}), ("patient", "visit")
    return train(made(track=("diagonal",), private=private, unit_names=names), steps=12).engine


NAMED: dict[str, Any] = {
    "attribute_names": list("abcde"),
    "attribute_scales": {"b": ("mg", -2.0, 7.0), "d": ("years", 3.0)},
}


def test_an_attribute_of_any_visit_is_that_of_the_closest_one(
    by_patient: Any, tmp_path: Path
) -> None:
    saved = load(by_patient.save_run(tmp_path / "run.parquet", delta=1e-5, **NAMED))
    assert saved.attributes.names == ["a", "b, any visit", "c, any visit", "d", "e, any visit"]
    assert saved.attributes.units == ["", "mg", "", "years", ""]
    fil, people = by_patient.get_attribute_fil(), list(dict.fromkeys(OWNERS.tolist()))
    x, scales = visits().tensors[0].numpy(), np.asarray([1.0, -2.0, 1.0, 3.0, 1.0])
    shown = x * scales + [0.0, 7.0, 0.0, 0.0, 0.0]
    found = {"error": fil.value.numpy(), "error_low": fil.interval(0.95)[1].numpy()}
    for kind, eta in found.items():
        for place, person in enumerate(people):
            own = np.flatnonzero(OWNERS.numpy() == person)
            for j in range(5):
                at = (
                    [18 + SHARED.index(j)]
                    if j in SHARED
                    else [3 * r + [1, 2, 4].index(j) for r in range(len(own))]
                )
                with np.errstate(divide="ignore"):
                    errors = abs(scales[j]) / eta[place, at]
                assert getattr(saved.attributes, kind)[place, j] == pytest.approx(
                    errors.min(), rel=1e-6
                )
                if kind == "error_low" and place in saved.records.rows and errors.min() > 0:
                    row = int(np.flatnonzero(saved.records.rows == place)[0])
                    assert saved.records.values[row, j] == pytest.approx(
                        shown[own[errors.argmin()], j]
                    )

    # all visits count alike in the spread; a blind guess errs as over all of them
    spread = saved.baselines.attributes
    one = shown[[int(np.flatnonzero(OWNERS.numpy() == person)[0]) for person in people]]
    for j in range(5):
        of = one[:, j] if j in SHARED else shown[:, j]
        told = [getattr(spread, name)[j] for name in ("mean", "std", "low", "high")]
        np.testing.assert_allclose(told, [of.mean(), of.std(), of.min(), of.max()], rtol=1e-9)
    assert np.isfinite(saved.baselines.attribute_errors).all()
    with pytest.raises(ValueError, match="1 entries for 5 private coordinates"):
        by_patient.save_run(tmp_path / "other.parquet", delta=1e-5, attribute_names=["a"])
    with pytest.raises(ValueError, match="rows share some of its levels"):
        by_patient.save_run(
            tmp_path / "other.parquet", delta=1e-5, **NAMED, attribute_groups={"g": ["a", "c"]}
        )


def of_visits(most: int, others: int) -> TensorDataset:
    """Twenty patients with so many visits each, one of them with ``most``.

    Whose each is stands in the last item.
    """
    counts = torch.full((20,), others).index_fill(0, torch.tensor([7]), most)
    patient = torch.arange(20).repeat_interleave(counts)
    number = torch.cat([torch.arange(count) for count in counts.tolist()])
    x = torch.randn(20, 11, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, :, SHARED] = x[:, :1, SHARED]
    return TensorDataset(x[patient, number], patient % 3, patient)


def saved_of(most: int, others: int, folder: Path, **options: Any) -> Any:
    dataset = of_visits(most, others)
    patients = dataset.tensors[2].tolist()
    given = {
        "track": ("diagonal",),
        "private": Private(shared={0: SHARED}),
        "questions": {"member": QUESTIONS["member"]},
    }
    given |= {
        "owner_of": patients,
        "sample_rate": 0.5,
        "unit_names": ("patient", "visit"),
        **options,
    }
    run = train(made(TensorDataset(*dataset.tensors[:2]), **given), steps=14)
    told: dict[str, Any] = {
        "title": "visits",
        "input_range": (-5.0, 5.0),
        "hash_data": False,
        "delta": 1e-3,
    }
    return load(
        run.engine.save_run(folder / "run.parquet", groups={"half": ["a", "b"] * 10}, **told)
    )


@pytest.mark.parametrize(
    ("options", "others"), [({}, 1), ({"private": None}, 2), ({"track": ()}, 2)]
)
def test_nothing_public_depends_on_how_many_visits_the_most_frequent_patient_has(
    options: dict[str, Any], others: int, tmp_path: Path
) -> None:
    """Two data sets differ in the visits of one patient.

    What was measured is made the same, so that the rest shows.
    """
    first, public = saved_of(others, others, tmp_path, **options), []
    for most in (others, 11):
        run = first if most == others else saved_of(most, others, tmp_path, **options)
        measured = ("columns", "questions", "history", "baselines")
        run = replace(run, **{name: getattr(first, name) for name in measured})
        if run.attributes is not None:
            errors = {name: getattr(first.attributes, name) for name in ("error", "error_low")}
            assert not np.isnan(run.attributes.error).any()
            run = replace(run, attributes=replace(run.attributes, **errors))
        run = replace(run, about=run.about | {"created": first.about["created"]})
        page, card = (
            write_report(run, tmp_path / f"page{most}", redacted=True, min_group=5),
            card_of(run, min_group=5),
        )
        rules = {"min_attribute_error_share": 99.0, "min_error_share": 99.0, "blind_error": 1.0}
        told = sarif(gate.check(run, parse_policy(rules)), None)
        files = [file.read_text() for file in sorted(page.parent.iterdir())]
        public.append([*files, card, told])
        assert "visit 1" not in str(public)
    assert public[1:] == public[:-1]
