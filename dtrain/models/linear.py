"""Generalised linear models."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtrain.models._dense import Dense
from dtrain.spec import whole


class _OneLayer(Dense):
    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Zeros: the problem is convex, no start is better.

        Returns
        -------
        dict
            ``weight`` of shape (n_features, outputs) and ``bias`` of shape (outputs,).
        """
        shape = self.widths
        return {"weight": np.zeros(shape, self.dtype), "bias": np.zeros(shape[1:], self.dtype)}


class Linear(_OneLayer):
    """A linear model for real targets, or for counts with ``loss="poisson"``.

    Parameters
    ----------
    n_features, n_outputs : int
        Columns of ``x`` and of ``y``.
    loss : {"squared", "huber", "poisson"}
        The mean over all elements of ``(p - y)**2``; of Huber's loss with delta 1; or of
        ``exp(p) - y p``, the Poisson likelihood with a log link (``predict`` gives the log of the
        mean).  As torch's ``MSELoss``, ``HuberLoss`` and ``PoissonNLLLoss``.
    l2 : float
        Adds ``l2 / 2`` times the sum of the squared weights to the loss; biases do not count.
    dtype : {"float32", "float64"}
        Of the parameters and of all arithmetic.

    Raises
    ------
    SpecError
        Names the argument, what was found and what is allowed.
    """

    def __init__(
        self,
        n_features: int,
        n_outputs: int = 1,
        loss: str = "squared",
        l2: float = 0.0,
        dtype: str = "float32",
    ) -> None:
        self.n_features = whole("n_features", n_features)
        self.n_outputs = whole("n_outputs", n_outputs)
        super().__init__(
            widths=(self.n_features, self.n_outputs),
            names=(("weight", "bias"),),
            loss=loss,
            losses=("squared", "huber", "poisson"),
            l2=l2,
            dtype=dtype,
        )

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as plain values."""
        return {
            "n_features": self.n_features,
            "n_outputs": self.n_outputs,
            "loss": self.loss_name,
            "l2": self.l2,
            "dtype": self.dtype,
        }


class Logistic(_OneLayer):
    """Logistic regression: two classes with one output, more with a softmax over one output each.

    Parameters
    ----------
    n_features : int
        Columns of ``x``.
    n_classes : int
        At least 2; targets are class indices from 0.
    l2 : float
        Adds ``l2 / 2`` times the sum of the squared weights to the loss; biases do not count.
    dtype : {"float32", "float64"}
        Of the parameters and of all arithmetic.

    Raises
    ------
    SpecError
        Names the argument, what was found and what is allowed.
    """

    def __init__(
        self, n_features: int, n_classes: int = 2, l2: float = 0.0, dtype: str = "float32"
    ) -> None:
        self.n_features = whole("n_features", n_features)
        classes = whole("n_classes", n_classes, least=2)
        loss = "logistic" if classes == 2 else "cross_entropy"
        super().__init__(
            widths=(self.n_features, 1 if classes == 2 else classes),
            names=(("weight", "bias"),),
            loss=loss,
            losses=(loss,),
            l2=l2,
            dtype=dtype,
        )

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as plain values."""
        return {
            "n_features": self.n_features,
            "n_classes": self.n_classes,
            "l2": self.l2,
            "dtype": self.dtype,
        }
