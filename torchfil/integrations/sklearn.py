"""A private classifier and a private regressor in scikit-learn's style.

Needs scikit-learn: ``pip install 'torchfil[glm]'``. The guide: docs/guide/scikit-learn.md.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil.engine import Accounting, FILPrivacyEngine
from torchfil.engine.reading import check_delta
from torchfil.questions import Question
from torchfil.utils.errors import installed_by
from torchfil.utils.noise import preserve_rng

with installed_by("glm", "PrivateClassifier and PrivateRegressor need scikit-learn"):
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils import validation as checks
    from sklearn.utils.multiclass import check_classification_targets

__all__ = ["PrivateClassifier", "PrivateRegressor"]


class _PrivateEstimator(BaseEstimator):
    """What both have in common: the parameters, and :meth:`_train`."""

    _criterion: nn.Module
    engine_: FILPrivacyEngine
    module_: nn.Module

    def __init__(
        self,
        *,
        module: Callable[[int, int], nn.Module] | None = None,
        hidden_layer_sizes: Sequence[int] = (),
        epochs: int = 30,
        batch_size: int = 64,
        lr: float = 0.5,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float = 1e-5,
        max_grad_norm: float = 1.0,
        questions: Mapping[str, Question] | None = None,
        accounting: Accounting | None = None,
        device: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.module, self.hidden_layer_sizes, self.device = module, hidden_layer_sizes, device
        self.epochs, self.batch_size, self.lr = epochs, batch_size, lr
        self.noise_multiplier, self.target_epsilon, self.delta = (
            noise_multiplier,
            target_epsilon,
            delta,
        )
        self.max_grad_norm, self.questions, self.accounting = max_grad_norm, questions, accounting
        self.random_state = random_state

    @property
    def leakage_(self) -> Any:
        """One row per training example: ``engine_.leakage(delta=delta)``; confidential."""
        if "engine_" not in vars(self):
            raise AttributeError(
                "leakage_ needs a fit, and is not kept in copies and pickles; read it where fit "
                "was called, or save the run there: engine_.save_run('run.parquet', delta=1e-5)"
            )
        return self.engine_.leakage(delta=self.delta)

    def __getstate__(self) -> dict[str, Any]:
        """Without the engine, which holds the training data and what leaked about it."""
        return {name: value for name, value in super().__getstate__().items() if name != "engine_"}

    def _checked(self, X: ArrayLike, *y: ArrayLike, **options: Any) -> Any:
        """X, and y, as scikit-learn checks them; floats keep their type."""
        options["dtype"] = [np.float64, np.float32]
        return checks.validate_data(self, X, *y, **options)

    def _train(
        self, X: np.ndarray, targets: np.ndarray, num_outputs: int, ids: list[Hashable] | None
    ) -> None:
        """Train a module on X [n, d] and the targets of the criterion, [n] or [n, outputs]."""
        chosen = [
            name
            for name in ("noise_multiplier", "target_epsilon")
            if getattr(self, name) is not None
        ]
        if not len(chosen) < 2:
            raise ValueError(
                "noise_multiplier and target_epsilon both choose the noise; keep one of them"
            )
        if not (isinstance(self.epochs, Integral) and self.epochs >= 1):
            raise ValueError(f"epochs={self.epochs} must be 1, 2, 3, …")
        check_delta(self.delta, type(self).__name__)
        if isinstance(self.module, nn.Module):
            raise ValueError(
                f"module={type(self.module).__name__}(…) is a module; pass a function of the "
                "numbers of features and outputs that returns a new one"
            )
        options: dict[str, Any] = {
            "max_grad_norm": self.max_grad_norm,
            "accounting": self.accounting,
            "id_of": ids,
        }
        options |= {} if self.questions is None else {"questions": self.questions}
        seed = None
        if self.random_state is not None:
            seed = int(check_random_state(self.random_state).randint(2**31))
            told = (
                f"random_state={self.random_state} seeds the noise, and whoever has it can "
                "subtract the noise"
            )
            warnings.warn(
                f"{told}. This is for tests; release a model with random_state=None.", stacklevel=3
            )

        with contextlib.nullcontext() if seed is None else preserve_rng(seed=seed):
            data = TensorDataset(torch.tensor(X), torch.tensor(targets))
            module = (self.module or self._network)(X.shape[1], num_outputs).to(
                self.device, data.tensors[0].dtype
            )
            with torch.no_grad():
                given = list(module.eval()(data.tensors[0][:1].to(self.device)).shape[1:])
            if given != [num_outputs]:
                raise ValueError(
                    f"module= has outputs {given} of an example; it must have {num_outputs}"
                )
            engine = FILPrivacyEngine(noise_seed=seed)
            optimizer, loader = (
                torch.optim.SGD(module.parameters(), lr=self.lr),
                DataLoader(data, self.batch_size),
            )
            parts, options["criterion"] = (module.train(), optimizer, loader), self._criterion
            if self.target_epsilon is None:
                *_, loader = engine.make_private(
                    *parts, noise_multiplier=self.noise_multiplier, **options
                )
            else:
                options |= {
                    "target_epsilon": self.target_epsilon,
                    "target_delta": self.delta,
                    "epochs": self.epochs,
                }
                *_, loader = engine.make_private_with_epsilon(*parts, **options)
            for _ in range(self.epochs):
                for batch in loader:
                    engine.train_step(*batch)

        engine.detach()
        self.engine_, self.module_ = engine, module.eval()
        self.epsilon_ = engine.get_epsilon(self.delta)

    def _network(self, num_inputs: int, num_outputs: int) -> nn.Module:
        """Linear layers with tanh between them."""
        sizes = [num_inputs, *self.hidden_layer_sizes, num_outputs]
        layers = [layer for ends in pairwise(sizes) for layer in (nn.Linear(*ends), nn.Tanh())]
        return nn.Sequential(*layers[:-1])

    def _outputs(self, X: ArrayLike) -> Tensor:
        """The module's outputs, [n, outputs], on the CPU."""
        checks.check_is_fitted(self)
        with torch.no_grad():
            own = next(self.module_.parameters())
            return self.module_(torch.tensor(self._checked(X, reset=False)).to(own)).cpu()


class PrivateClassifier(ClassifierMixin, _PrivateEstimator):
    """A classifier trained by DP-SGD, which knows what it leaks about each training example.

    A linear model or a small network, trained with cross-entropy in
    :class:`torchfil.FILPrivacyEngine`. Each step draws each example with probability 1/⌈n /
    ``batch_size``⌉, and clips its gradient to ``max_grad_norm``.

    Guarantees:
        * ``epsilon_`` binds every attacker, whatever they know, for every example: the noise and
          the draws are random. The number n of examples and the classes in y count as public.
        * ``leakage_`` says what this run leaked about each example, with errors; who is bound by
          which column stands in :meth:`torchfil.accounting.leakage.Leakage.leakage`. It is
          confidential.

    **Scale the features by constants that you know without the data**: a scaler that is fitted on
    private data, as StandardScaler, releases their means, which neither ``epsilon_`` nor
    ``leakage_`` counts. Sample weights are not supported, nor is ``partial_fit``.

    **Several fits release several models.** A grid search, a cross-validation or a second ``fit``
    spends its own ε on the examples; ``epsilon_`` is that of the last fit alone. Scores on private
    data are not private either.

    **What is kept.** A copy or a pickle predicts and has ``epsilon_``. It has neither ``engine_``
    nor ``leakage_``, which hold private data: save the run before, by ``engine_.save_run(path,
    delta=delta)``.

    Args:
        module: A function of the numbers of features and outputs that returns a torch module (a
            network that suits :class:`torchfil.FILPrivacyEngine`); None: linear layers with tanh
            between them.
        hidden_layer_sizes: Widths of its hidden layers; (): a linear model.
        epochs: Passes over the data.
        batch_size: Examples per step, on average.
        lr: The step size of SGD.
        noise_multiplier: σ: the noise on a sum of clipped gradients has the deviation σ ·
            ``max_grad_norm``. None: 1.0, unless ``target_epsilon`` is given.
        target_epsilon: ε to be spent in all epochs, which chooses σ.
        delta: δ of ``epsilon_``, ``target_epsilon`` and the individual ε; well below 1/n.
        max_grad_norm: C, the threshold of clipping.
        questions: By name, what an attacker wants to know about each example
            (:mod:`torchfil.questions`).
        accounting: How leakage is measured (:class:`torchfil.Accounting`), such as
            ``Accounting(track=("diagonal",))`` for single features.
        device: The device for training and predictions.
        random_state: None: weights come from torch's generator, noise and draws from one that the
            operating system seeds, and no two fits are alike. A number or a RandomState seeds all
            of them, for tests: a fit can then be repeated, and **whoever has the seed can subtract
            the noise**. This warns, the run file says so, and ``torchfil gate`` fails such a run.

    Attributes:
        classes_: The labels, [classes].
        n_features_in_: The number of features.
        feature_names_in_: Their names, if X is a table with names.
        module_: The trained module: what is released.
        epsilon_: ε at ``delta``, of this fit.
        engine_: The engine, detached, for reports, run files and further readings; confidential.
        leakage_: The table of ``engine_.leakage(delta=delta)``; its ids are the index of X, if that
            is a pandas table with a unique index, else the rows' numbers. Confidential.

    Example:
        >>> import numpy as np
        >>> from torchfil import PrivateClassifier
        >>> X = np.linspace(-1, 1, 200)[:, None]
        >>> model = PrivateClassifier(noise_multiplier=1.0).fit(
        ...     X, np.where(X[:, 0] > 0, "high", "low")
        ... )
        >>> model.predict([[-0.9], [0.9]]).tolist(), len(model.leakage_)
        (['low', 'high'], 200)
    """

    _criterion = nn.CrossEntropyLoss()

    def fit(self, X: ArrayLike, y: ArrayLike) -> PrivateClassifier:
        """Train on examples X [n, features] with labels y [n]."""
        ids = _index_of(X)
        rows, labels = self._checked(X, y)
        check_classification_targets(labels)
        classes, targets = np.unique(labels, return_inverse=True)
        if not len(classes) > 1:
            raise ValueError(f"y has only one class, {classes[0]!r}; a classifier needs two")
        self._train(rows, targets, len(classes), ids)
        self.classes_ = classes
        return self

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """The probability of each class, [n, classes]."""
        return self._outputs(X).softmax(dim=1).numpy()

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The likeliest class of each example, [n]."""
        # classes_ are there after this check of a fit
        likeliest = self._outputs(X).argmax(dim=1).numpy()
        return self.classes_[likeliest]


class PrivateRegressor(RegressorMixin, _PrivateEstimator):
    """A regressor trained by DP-SGD with the squared error, which knows what it leaks about each
    training example.

    Everything is as in :class:`PrivateClassifier`, except ``classes_``. Scale y by constants as
    well: with clipped gradients, a step moves the weights by at most ``lr`` · ``max_grad_norm``
    (and noise), however far y is.

    Example:
        >>> import numpy as np
        >>> from torchfil import PrivateRegressor
        >>> X = np.linspace(-1, 1, 200)[:, None]
        >>> bool(PrivateRegressor(noise_multiplier=1.0).fit(X, X[:, 0]).score(X, X[:, 0]) > 0.8)
        True
    """

    _criterion = nn.MSELoss()

    def fit(self, X: ArrayLike, y: ArrayLike) -> PrivateRegressor:
        """Train on examples X [n, features] with targets y [n]."""
        ids = _index_of(X)
        rows, targets = self._checked(X, y, y_numeric=True)
        self._train(rows, targets[:, None].astype(rows.dtype), 1, ids)
        return self

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The prediction for each example, [n]."""
        return self._outputs(X)[:, 0].numpy()


def _index_of(X: Any) -> list[Hashable] | None:
    """The index of a pandas table, as the examples' ids.

    None if X is none, or rows share an entry.
    """
    return X.index.tolist() if hasattr(X, "iloc") and X.index.is_unique else None
