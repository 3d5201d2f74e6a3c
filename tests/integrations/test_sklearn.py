"""PrivateClassifier and PrivateRegressor: scikit-learn's own checks, the same run by hand, and what
copies keep.
"""

from __future__ import annotations

import math
import pickle
import warnings
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from opacus.accountants import RDPAccountant
from sklearn.base import clone
from sklearn.utils import check_random_state
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.loops import step
from tests.engine.ways import weights_of
from torchfil import FILPrivacyEngine, PrivateClassifier, PrivateRegressor
from torchfil.questions import Absent
from torchfil.utils.noise import preserve_rng

SEEDED = pytest.mark.filterwarnings("ignore:random_state")
BOTH = pytest.mark.parametrize("kind", [PrivateClassifier, PrivateRegressor])


def data(n: int = 90, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(seed).uniform(-1, 1, (n, 3))
    return X, (X[:, 0] > 0).astype(int)


# ---------------------------------------------------------------- scikit-learn's checks: none fails


@SEEDED
@parametrize_with_checks([PrivateClassifier(epochs=10), PrivateRegressor(epochs=10)])
def test_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


# ---------------------------------------------------------------------- the same run by hand


@SEEDED
@BOTH
def test_a_fit_is_the_plain_loop(kind: Any) -> None:
    X, y = data()
    options: dict[str, Any] = {
        "epochs": 3,
        "batch_size": 30,
        "lr": 0.7,
        "max_grad_norm": 0.5,
        "noise_multiplier": 1.3,
    }
    names = [f"patient {i}" for i in range(90)]
    table = pandas.DataFrame(X, columns=["age", "dose", "weight"], index=names)
    model = kind(
        random_state=5, hidden_layer_sizes=(4,), questions={"in?": Absent()}, **options
    ).fit(table, y)

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
            id_of=names,
        )
        for _ in range(3):
            for batch in loader:
                step(private, optimizer, batch, loss)

    torch.testing.assert_close(weights_of(model.module_), weights_of(module))
    pandas.testing.assert_frame_equal(
        pandas.DataFrame(model.leakage_), pandas.DataFrame(engine.leakage(delta=1e-5))
    )
    with torch.no_grad():
        expected = module(torch.tensor(X))
    if kind is PrivateClassifier:
        np.testing.assert_allclose(model.predict_proba(table), expected.softmax(dim=1))
        assert model.predict(table).tolist() == expected.argmax(dim=1).tolist()
    else:
        np.testing.assert_allclose(model.predict(table), expected[:, 0])


@BOTH
def test_epsilon_is_that_of_the_steps_that_were_taken(kind: Any) -> None:
    X, y = data(100)
    accountant = RDPAccountant()
    accountant.history = [(0.9, 1 / 4, 2 * 4)]  # 100 examples in batches of 30: four steps an epoch
    model = kind(epochs=2, batch_size=30, noise_multiplier=0.9, delta=1e-4).fit(X, y)
    assert model.epsilon_ == pytest.approx(accountant.get_epsilon(1e-4))
    aimed = kind(epochs=2, batch_size=30, target_epsilon=2.0, delta=1e-4).fit(X, y)
    assert 1.97 < aimed.epsilon_ <= 2.0


# ------------------------------------------------------------------ who is random, and who can know


@pytest.mark.usefixtures("noise_of_users")
@BOTH
def test_noise_is_new_in_each_fit_unless_it_is_seeded(kind: Any) -> None:
    """Without a seed even torch's own does not repeat it.

    With one everything is repeated, and torch's state stays.
    """
    X, y = data()
    found = []
    for seed in (None, None, 3, 3, np.random.RandomState(3)):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if seed is None else "ignore")
            model = kind(epochs=1, noise_multiplier=1.0, random_state=seed).fit(X, y)
            found.append(weights_of(model.module_))
        if seed is not None:
            assert torch.equal(
                torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(0))
            )
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert torch.equal(found[2], found[4])


# ---------------------------------------------------------------------- ids, copies, searches


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


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"noise_multiplier": 1.0, "target_epsilon": 1.0}, "target_epsilon"),
        ({"module": nn.Linear(3, 2)}, "module=Linear"),
        ({"module": lambda *_: nn.Linear(3, 3)}, r"outputs \[3\]"),
        ({"epochs": 0}, "epochs=0"),
        ({"delta": math.nan}, "delta=nan"),
    ],
)
def test_wrong_options(options: dict[str, Any], noun: str) -> None:
    with pytest.raises(ValueError, match=noun):
        PrivateClassifier(**options).fit(*data())
