"""The two estimators: how arguments of scikit-learn become a job, and its result an estimator."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_array,
    check_consistent_length,
    check_is_fitted,
    check_random_state,
    column_or_1d,
    validate_data,
)

from dtrain.cluster import connect, current_client
from dtrain.errors import SpecError
from dtrain.frames import Columns, is_frame
from dtrain.inputs import encoded_labels, labels_of
from dtrain.models import MLP, Linear, Logistic
from dtrain.prediction import Trained
from dtrain.result import Result
from dtrain.sources import array_of
from dtrain.spec import Mode, Sync
from dtrain.training import fit

if TYPE_CHECKING:
    from distributed import Client

    from dtrain.optim import Optimizer


#: Of both estimators.
_ABOUT = """

Parameters
----------
hidden_layer_sizes : sequence of int
    The widths of the hidden layers; none for a linear model.
activation : {"relu", "tanh"}
    After each hidden layer.
l2 : float
    Adds ``l2 / 2`` times the sum of the squared weights to the loss.
optimizer : dtrain.optim.Optimizer, optional
    Adam with its defaults if not given.
epochs : int
batch_size : int
    Samples per replica and step.
shuffle : bool
    Mix the rows anew in each epoch.
mode : dtrain.Sync or dtrain.Async, optional
    ``Sync()`` if not given.
replicas, shards : int, optional
    One per worker if not given.
dtype : {"float64", "float32"}
    Of the parameters and of all arithmetic; float64 as in scikit-learn's own estimators.
client : str, optional
    The address of a scheduler.  None: the current client, else workers in this very process
    for the length of the call.
random_state : int, RandomState or None
    Where the first parameters and the order of the rows come from.

Attributes
----------
result_ : dtrain.Result
    What the last call of ``fit`` or ``partial_fit`` gave.
history_ : list of dict
    One per epoch of it.
loss_curve_ : list of float
    The losses of these epochs.
n_features_in_ : int
feature_names_in_ : ndarray of str
    If it was a frame.
"""


class _Estimator(ABC, BaseEstimator):
    """What both have in common."""

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (100,),
        *,
        activation: str = "relu",
        l2: float = 0.0,
        optimizer: Optimizer | None = None,
        epochs: int = 50,
        batch_size: int = 32,
        shuffle: bool = True,
        mode: Mode | None = None,
        replicas: int | None = None,
        shards: int | None = None,
        dtype: str = "float64",
        client: str | None = None,
        random_state: Any = None,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.l2 = l2
        self.optimizer = optimizer
        self.epochs = epochs
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.mode = mode
        self.replicas = replicas
        self.shards = shards
        self.dtype = dtype
        self.client = client
        self.random_state = random_state

    # -- training ------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train anew.

        Parameters
        ----------
        X : array or frame, shape (n, features)
            Of NumPy, pandas or Dask.
        y : array or series, shape (n,)
        sample_weight : array or series, shape (n,), optional
            What each row counts.

        Returns
        -------
        self
        """
        return self._fit(X, y, sample_weight, epochs=self.epochs)

    def _fit(
        self,
        X: Any,
        y: Any,
        weights: Any,
        *,
        epochs: int,
        known: Any = None,
        before: Result | None = None,
    ) -> Any:
        """``known``: classes that are told; ``before``: what to go on from."""
        if self.client is not None and not isinstance(self.client, str):
            raise SpecError(
                f"client: found {type(self.client).__name__}, expected the address of a scheduler, "
                f"or None for the current client"
            )
        with _connected(self.client, self.replicas) as client:
            if _lies_elsewhere(X):
                features = self._know_columns(X)
                y, outputs = self._look_at(y, known, client)
                replicas = self.replicas
            else:
                X = validate_data(self, X, dtype=[np.float64, np.float32], reset=before is None)
                y, outputs = self._targets(y, known)
                check_consistent_length(X, y)
                if weights is not None:
                    weights = _check_sample_weight(weights, X, ensure_non_negative=True)
                features = X.shape[1]
                replicas = self._replicas(len(X), client)
            self.result_ = fit(
                self._model(features, outputs),
                X,
                y,
                sample_weight=weights,
                optimizer=self.optimizer,
                mode=self.mode or Sync(),
                replicas=replicas,
                shards=self.shards,
                batch_size=self.batch_size,
                epochs=epochs,
                shuffle=self.shuffle,
                seed=_seed(self.random_state),
                initial=before,
                client=client,
                progress=False,
            )
        self.history_ = self.result_.history
        self.loss_curve_ = [epoch["loss"] for epoch in self.history_]
        return self

    def _replicas(self, rows: int, client: Client) -> int:
        """As many as were asked for, else one per worker, but none without a row."""
        return self.replicas or min(rows, len(client.scheduler_info(-1)["workers"]))

    def _know_columns(self, X: Any) -> int:
        """Note what a collection's columns are called; how many features they make."""
        if not is_frame(X):
            self.n_features_in_ = int(array_of(X, "X").shape[1])
            return self.n_features_in_
        self.feature_names_in_ = np.array([str(name) for name in X.columns], object)
        self.n_features_in_ = len(X.columns)
        return Columns.of(X, "X").width

    @abstractmethod
    def _model(self, features: int, outputs: int) -> Any:
        """What is trained."""

    @abstractmethod
    def _targets(self, y: Any, known: Any) -> tuple[np.ndarray, int]:
        """Targets in memory, checked, and how many outputs a model has for them."""

    @abstractmethod
    def _look_at(self, y: Any, known: Any, client: Client) -> tuple[Any, int]:
        """The same for targets of a collection."""

    # -- prediction ----------------------------------------------------------------------------

    @property
    def _trained(self) -> Trained:
        check_is_fitted(self)
        result: Result = self.result_
        return result.trained

    def _rows(self, X: Any) -> Any:
        """What predictions are made of."""
        check_is_fitted(self)
        if _lies_elsewhere(X) or (is_frame(X) and self.result_.columns is not None):
            return X
        return validate_data(self, X, dtype=[np.float64, np.float32], reset=False)

    def predict(self, X: Any) -> Any:
        """Labels, or numbers, shape (n,); lazily, and with the index of a frame, for Dask."""
        return self._trained.predict(self._rows(X), "labels")

    def _score(self, X: Any, y: Any, sample_weight: Any, metric: str) -> float:
        trained = replace(self._trained, metrics=(metric,))
        return trained.evaluate(self._rows(X), y, sample_weight)[metric]


class DTrainClassifier(ClassifierMixin, _Estimator):
    __doc__ = (
        "A classifier: a multi-layer perceptron, or logistic regression."
        + _ABOUT
        + "classes_ : ndarray of shape (n_classes,)\n    The sorted unique labels.\n"
    )

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> DTrainClassifier:
        """Train for one epoch more, from the parameters there are.

        What the optimizer gathers, momentum say, begins anew with each call.

        Parameters
        ----------
        X, y, sample_weight
            As for :meth:`fit`.
        classes : array, optional
            All labels there will ever be; wanted by the first call alone.
        """
        before = getattr(self, "result_", None)
        if before is None:
            known = None if classes is None else np.unique(classes)
        else:
            known = self.classes_
            if classes is not None and not np.array_equal(np.unique(classes), known):
                raise ValueError(
                    f"classes: found {classes!r}, expected those of the first call, {known!r}"
                )
        return self._fit(X, y, sample_weight, epochs=1, known=known, before=before)

    def predict_proba(self, X: Any) -> Any:
        """Class probabilities, shape (n, n_classes), in the order of ``classes_``."""
        return self._trained.predict(self._rows(X), "probabilities")

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The accuracy."""
        return self._score(X, y, sample_weight, "accuracy")

    def _model(self, features: int, outputs: int) -> Any:
        hidden = tuple(self.hidden_layer_sizes)
        if not hidden:
            return Logistic(features, outputs, l2=self.l2, dtype=self.dtype)
        return MLP(
            (features, *hidden, outputs),
            activation=self.activation,
            l2=self.l2,
            dtype=self.dtype,
        )

    def _targets(self, y: Any, known: Any) -> tuple[np.ndarray, int]:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self._know_classes(np.unique(y), known)
        return np.searchsorted(self.classes_, y), len(self.classes_)

    def _look_at(self, y: Any, known: Any, client: Client) -> tuple[Any, int]:
        y = array_of(y, "y", labels=True)
        self._know_classes(labels_of(client, y), known)
        return encoded_labels(y, self.classes_), len(self.classes_)

    def _know_classes(self, found: np.ndarray, known: Any) -> None:
        classes = found if known is None else known
        if len(unseen := np.setdiff1d(found, classes)):
            raise ValueError(
                f"y: found the label {unseen.tolist()[0]!r}, expected one of {classes.tolist()}"
            )
        if len(classes) < 2:
            raise ValueError(
                f"y: found the one class {classes.tolist()[0]!r}, expected two classes or more"
            )
        self.classes_ = classes

    @property
    def _trained(self) -> Trained:
        # What was trained on are places among the classes.
        return replace(super()._trained, classes=self.classes_)


class DTrainRegressor(RegressorMixin, _Estimator):
    __doc__ = "A regressor: a multi-layer perceptron, or a linear model; squared errors." + _ABOUT

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> DTrainRegressor:
        """Train for one epoch more, from the parameters there are.

        What the optimizer gathers, momentum say, begins anew with each call.
        """
        before = getattr(self, "result_", None)
        return self._fit(X, y, sample_weight, epochs=1, before=before)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The coefficient of determination, R2."""
        return self._score(X, y, sample_weight, "r2")

    def _model(self, features: int, outputs: int) -> Any:
        hidden = tuple(self.hidden_layer_sizes)
        if not hidden:
            return Linear(features, outputs, l2=self.l2, dtype=self.dtype)
        return MLP(
            (features, *hidden, outputs),
            activation=self.activation,
            loss="squared",
            l2=self.l2,
            dtype=self.dtype,
        )

    def _targets(self, y: Any, known: Any) -> tuple[np.ndarray, int]:
        y = column_or_1d(y, warn=True)
        y = check_array(y, ensure_2d=False, dtype=[np.float64, np.float32], input_name="y")
        return y, 1

    def _look_at(self, y: Any, known: Any, client: Client) -> tuple[Any, int]:
        y = array_of(y, "y", labels=True)
        return y, 1 if y.ndim == 1 else int(y.shape[1])


def _lies_elsewhere(X: Any) -> bool:
    """Whether its rows are not NumPy's: a Dask collection, or a frame that has categories."""
    if hasattr(X, "__dask_graph__"):
        return True
    return is_frame(X) and any(hasattr(dtype, "categories") for dtype in X.dtypes)


@contextmanager
def _connected(address: str | None, replicas: int | None) -> Iterator[Client]:
    """A client: that address's, the current one, or one of workers in this very process."""
    if address is not None or current_client() is not None:
        with connect(address) as client:
            yield client
        return
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=replicas or 1,
            threads_per_worker=1,
            processes=False,
            dashboard_address=None,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def _seed(random_state: Any) -> int:
    if isinstance(random_state, numbers.Integral):
        return int(random_state)
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
