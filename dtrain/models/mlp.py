"""The multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dtrain.checks import choice
from dtrain.errors import SpecError
from dtrain.models._dense import Dense
from dtrain.spec import whole


class MLP(Dense):
    """Fully connected layers.

    Parameters
    ----------
    layers : sequence of int
        The number of features, the widths of the hidden layers if any, the number of outputs.
    activation : {"relu", "tanh"}
        After each hidden layer.
    loss : {"cross_entropy", "squared", "logistic"}
        ``"cross_entropy"``: one output for each class, at least two.  ``"logistic"``: two classes,
        one output.  ``"squared"``: the mean over all elements of ``(p - y)**2``.
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
        layers: Sequence[int],
        activation: str = "relu",
        loss: str = "cross_entropy",
        l2: float = 0.0,
        dtype: str = "float32",
    ) -> None:
        if not isinstance(layers, Sequence | np.ndarray) or isinstance(layers, str | bytes):
            raise SpecError(f"layers: found {layers!r}, expected a list of whole numbers")
        widths = tuple(whole(f"layers[{i}]", width) for i, width in enumerate(layers))
        if len(widths) < 2:
            raise SpecError(
                f"layers: found {list(widths)}, expected at least the features and the outputs"
            )
        self.activation = choice("activation", activation, ("relu", "tanh"))
        super().__init__(
            widths=widths,
            names=tuple((f"dense{i}.weight", f"dense{i}.bias") for i in range(len(widths) - 1)),
            loss=loss,
            losses=("cross_entropy", "squared", "logistic"),
            l2=l2,
            dtype=dtype,
            activation=activation,
        )

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Normal weights and zero biases.

        Variances are 2 / in for relu (He et al., 2015), 2 / (in + out) for tanh (Glorot and
        Bengio, 2010).

        Returns
        -------
        dict
            ``dense<i>.weight`` of shape (in, out) and ``dense<i>.bias`` of shape (out,).
        """
        params = {}
        dtype: Any = np.dtype(self.dtype)
        for (weight, bias), (n_in, n_out) in zip(self.names, self.shapes, strict=True):
            values = rng.standard_normal((n_in, n_out), dtype=dtype)
            values *= math.sqrt(2 / (n_in if self.activation == "relu" else n_in + n_out))
            params[weight], params[bias] = values, np.zeros(n_out, dtype)
        return params

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as plain values."""
        return {
            "layers": list(self.widths),
            "activation": self.activation,
            "loss": self.loss_name,
            "l2": self.l2,
            "dtype": self.dtype,
        }
