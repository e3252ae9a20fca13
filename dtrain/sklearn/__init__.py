"""Estimators for pipelines of scikit-learn: the extra ``sklearn``.

``DTrainClassifier`` and ``DTrainRegressor`` train multi-layer perceptrons, or linear models where
there is no hidden layer, on a Dask cluster; they take arrays and frames of NumPy, pandas and Dask.
"""

from __future__ import annotations

try:
    import sklearn as _sklearn  # noqa: F401 - only to tell early, and what to do
except ImportError as error:
    raise ImportError(
        "dtrain.sklearn needs scikit-learn, which is not installed; "
        "pip install 'dtrain[sklearn]' brings it"
    ) from error

from dtrain.sklearn._estimators import DTrainClassifier, DTrainRegressor

__all__ = ["DTrainClassifier", "DTrainRegressor"]
