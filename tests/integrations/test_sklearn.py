"""PrivateClassifier and PrivateRegressor: scikit-learn's own checks, the same run by hand, and what copies keep."""

from __future__ import annotations

import importlib
import math
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from opacus.accountants import RDPAccountant
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import check_random_state
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchfil
from torchfil import Accounting, FILPrivacyEngine, PrivateClassifier, PrivateRegressor
from torchfil.gate.gate import check, default_policy
from torchfil.questions import Absent
from torchfil.report import load
from torchfil.utils.noise import preserve_rng

SEEDED = pytest.mark.filterwarnings("ignore:random_state")
BOTH = pytest.mark.parametrize("kind", [PrivateClassifier, PrivateRegressor])


def data(n: int = 90, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(seed).uniform(-1, 1, (n, 3))
    return X, (X[:, 0] > 0).astype(int)


def weights(model: Any) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.module_.parameters()).detach()


# ---------------------------------------------------------------------- scikit-learn's checks: none fails


@SEEDED
@parametrize_with_checks([PrivateClassifier(epochs=10), PrivateRegressor(epochs=10)])
def test_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@SEEDED
@BOTH
def test_checks_of_scikit_learn_with_the_defaults(kind: Any) -> None:
    check_estimator(kind())


# ---------------------------------------------------------------------- the same run by hand


@SEEDED
@BOTH
def test_a_fit_is_the_plain_loop(kind: Any) -> None:
    X, y = data()
    options: dict[str, Any] = {"epochs": 3, "batch_size": 30, "lr": 0.7, "max_grad_norm": 0.5, "noise_multiplier": 1.3}
    model = kind(random_state=5, hidden_layer_sizes=(4,), questions={"in?": Absent()}, **options).fit(X, y)

    seed = int(check_random_state(5).randint(2**31))
    outputs = 2 if kind is PrivateClassifier else 1
    loss = F.cross_entropy if outputs == 2 else F.mse_loss
    targets = torch.tensor(y) if outputs == 2 else torch.tensor(y)[:, None].double()
    with preserve_rng(seed=seed):
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
        engine = FILPrivacyEngine(noise_seed=seed)
        private, optimizer, loader = engine.make_private(
            module,
            torch.optim.SGD(module.parameters(), lr=0.7),
            DataLoader(TensorDataset(torch.tensor(X), targets), batch_size=30),
            noise_multiplier=1.3,
            max_grad_norm=0.5,
            questions={"in?": Absent()},
        )
        for _ in range(3):
            for inputs, wanted in loader:
                optimizer.zero_grad()
                loss(private(inputs), wanted).backward()
                optimizer.step()

    torch.testing.assert_close(weights(model), nn.utils.parameters_to_vector(module.parameters()).detach())
    pandas.testing.assert_frame_equal(pandas.DataFrame(model.leakage_), pandas.DataFrame(engine.leakage(delta=1e-5)))
    with torch.no_grad():
        expected = module(torch.tensor(X))
    if kind is PrivateClassifier:
        np.testing.assert_allclose(model.predict_proba(X), expected.softmax(dim=1))
        assert model.predict(X).tolist() == expected.argmax(dim=1).tolist()
    else:
        np.testing.assert_allclose(model.predict(X), expected[:, 0])


@BOTH
def test_epsilon_is_that_of_the_steps_that_were_taken(kind: Any) -> None:
    X, y = data(100)
    accountant = RDPAccountant()
    accountant.history = [(0.9, 1 / 4, 2 * 4)]  # 100 examples in batches of 30: four steps an epoch
    model = kind(epochs=2, batch_size=30, noise_multiplier=0.9, delta=1e-4).fit(X, y)
    assert model.epsilon_ == pytest.approx(accountant.get_epsilon(1e-4))
    aimed = kind(epochs=2, batch_size=30, target_epsilon=2.0, delta=1e-4).fit(X, y)
    assert 1.97 < aimed.epsilon_ <= 2.0


def test_a_module_of_the_users_own() -> None:
    def network(num_features: int, num_outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(num_features, 7), nn.Softplus(), nn.Linear(7, num_outputs))

    X, y = data()
    model = PrivateClassifier(module=network, epochs=2).fit(
        X.astype(np.float32), np.array(["a", "b", "c"])[y + (X[:, 1] > 0)]
    )
    assert model.classes_.tolist() == ["a", "b", "c"]
    assert model.predict_proba(X).shape == (90, 3)
    assert weights(model).dtype == torch.float32
    assert isinstance(model.module_[1], nn.Softplus)


# ---------------------------------------------------------------------- who is random, and who can know


@pytest.mark.usefixtures("noise_of_users")
@BOTH
def test_noise_is_new_in_each_fit_unless_it_is_seeded(kind: Any) -> None:
    """Without a seed even torch's own does not repeat it; with one everything is repeated, and torch's state stays."""
    X, y = data()
    found = []
    for seed in (None, None, 3, 3, np.random.RandomState(3)):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if seed is None else "ignore")
            found.append(weights(kind(epochs=1, noise_multiplier=1.0, random_state=seed).fit(X, y)))
        if seed is not None:
            assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert torch.equal(found[2], found[4])


@pytest.mark.usefixtures("noise_of_users")
def test_a_seeded_run_is_marked_and_fails_the_gate(tmp_path: Path) -> None:
    X, y = data()
    for seed, kind in ((None, "OS-seeded"), (1, "seeded")):
        model = PrivateClassifier(epochs=2, random_state=seed)
        with pytest.warns(UserWarning, match="random_state=1") if seed else warnings.catch_warnings():
            model.fit(X, y)
        run = load(model.engine_.save_run(tmp_path / "run.parquet", delta=1e-5))
        assert run.about["mechanism"]["noise"] == kind
        (ruling,) = [verdict for verdict in check(run, default_policy(run)) if verdict.rule == "allow_seeded_noise"]
        assert ruling.passed == (seed is None)


# ---------------------------------------------------------------------- ids, copies, searches


def test_ids_are_the_index_of_a_table() -> None:
    X, y = data()
    frame = pandas.DataFrame(X, columns=["age", "dose", "weight"], index=[f"patient {i}" for i in range(90)])
    model = PrivateClassifier(epochs=1).fit(frame, y)
    assert model.leakage_.index.tolist() == frame.index.tolist()
    assert model.feature_names_in_.tolist() == ["age", "dose", "weight"]
    assert PrivateClassifier(epochs=1).fit(pandas.concat([frame, frame]), [*y, *y]).leakage_.index.tolist() == list(
        range(180)
    )
    assert PrivateClassifier(epochs=1).fit(X.tolist(), y).leakage_.index.tolist() == list(range(90))


@BOTH
def test_copies_predict_and_hold_no_training_data(kind: Any) -> None:
    X, y = data()
    X[0, 0] = 0.123456789
    model = kind(epochs=2).fit(X, y)
    content = pickle.dumps(model)
    for secret in (X[0, 0], model.leakage_.fil.iloc[0]):
        assert np.float64(secret).tobytes() in pickle.dumps((model.leakage_, X))
        assert np.float64(secret).tobytes() not in content
    copy = pickle.loads(content)
    assert np.array_equal(copy.predict(X), model.predict(X))
    assert copy.epsilon_ == model.epsilon_
    assert not hasattr(copy, "engine_")
    for without in (copy, kind()):
        with pytest.raises(AttributeError, match="leakage_"):
            _ = without.leakage_
    fresh = clone(model)
    assert not hasattr(fresh, "epsilon_")
    assert fresh.get_params() == model.get_params()


def test_pipelines_and_searches() -> None:
    X, y = data(300)
    scale = FunctionTransformer(lambda X: X / 2)  # known without the data
    search = GridSearchCV(
        make_pipeline(scale, PrivateClassifier(epochs=8)), {"privateclassifier__lr": [1e-6, 1.0]}, cv=2
    )
    search.fit(X, y)
    assert search.best_params_ == {"privateclassifier__lr": 1.0}
    assert len(search.best_estimator_[-1].leakage_) == 300
    assert cross_val_score(PrivateRegressor(epochs=8), X, X[:, 0] / 2, cv=2).min() > 0.5


def test_options_of_the_accounting(tmp_path: Path) -> None:
    X, y = data()
    model = PrivateRegressor(epochs=2, accounting=Accounting(num_probes=1, track=("diagonal",))).fit(X, y)
    assert model.engine_.get_attribute_fil().value.shape == (90, 3)
    run = load(model.engine_.save_run(tmp_path / "run.parquet", delta=1e-5, attribute_names=["a", "b", "c"]))
    assert run.attributes is not None
    assert run.attributes.names == ["a", "b", "c"]
    assert math.isclose(run.about["epsilon"], model.epsilon_)


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"noise_multiplier": 1.0, "target_epsilon": 1.0}, "target_epsilon"),
        ({"module": nn.Linear(3, 2)}, "module=Linear"),
        ({"module": lambda *_: nn.Linear(3, 3)}, r"outputs \[3\]"),
        ({"module": lambda *_: nn.Linear(3, 1)}, r"outputs \[1\]"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 1.5}, "epochs=1.5"),
        ({"delta": 2}, "delta=2"),
        ({"delta": math.nan}, "delta=nan"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_wrong_options(options: dict[str, Any], noun: str) -> None:
    with pytest.raises(ValueError, match=noun):
        PrivateClassifier(**options).fit(*data())


def test_a_fit_that_fails_leaves_the_last_one() -> None:
    X, y = data()
    model = PrivateClassifier(epochs=1).fit(X, y)
    before = model.predict(X)
    with pytest.raises(ValueError, match="epochs"):
        model.set_params(epochs=0).fit(X, np.where(y == y[0], "other", "labels"))
    assert (model.predict(X) == before).all()


def test_one_class_is_too_few() -> None:
    with pytest.raises(ValueError, match="one class"):
        PrivateClassifier().fit(data()[0], np.ones(90))


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchfil.integrations.sklearn")
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(ImportError, match=r"torchfil\[glm\]"):
        _ = torchfil.PrivateClassifier
    monkeypatch.undo()
    assert importlib.import_module("torchfil.integrations.sklearn").PrivateClassifier is PrivateClassifier
