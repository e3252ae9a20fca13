"""Fully connected layers: forward, backward and checks, shared by all models of this package."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from dtrain.arrays import Array, as_array, copy_into, quiet, xp_of
from dtrain.checks import choice, number
from dtrain.errors import DataError, SpecError
from dtrain.models._workspace import Workspace, Workspaces
from dtrain.models.losses import LOSSES, Scale, targets

#: Rows that `predict` and `loss` take at a time: it bounds what a workspace holds afterwards.
_ROWS = 1024
#: Elements of a weight that the l2 penalty takes at a time, to stay in the L2 cache.
_ELEMENTS = 32768


class Dense(ABC):
    """Layers ``z = a @ weight + bias`` with an activation between them and a loss at the end.

    It is stateless: parameters come as arguments.  Only scratch memory is kept, for each thread,
    which is neither pickled nor compared.

    Attributes
    ----------
    widths : tuple of int
        Features, hidden widths, outputs.
    names : tuple of (str, str)
        The names of weight and bias of each layer.
    n_classes : int or None
        None for regression.
    """

    def __init__(
        self,
        *,
        widths: tuple[int, ...],
        names: tuple[tuple[str, str], ...],
        loss: str,
        losses: tuple[str, ...],
        l2: float,
        dtype: str,
        activation: str = "",
    ) -> None:
        self.widths = widths
        self.names = names
        self.shapes = tuple(pairwise(widths))
        self.loss_name = choice("loss", loss, losses)
        self.l2 = number("l2", l2)
        self.dtype = choice("dtype", _dtype_name(dtype), ("float32", "float64"))
        if loss == "logistic" and widths[-1] != 1:
            raise SpecError(f"layers: found {widths[-1]} outputs, expected 1 for loss 'logistic'")
        if loss == "cross_entropy" and widths[-1] < 2:
            raise SpecError(
                f"layers: found {widths[-1]} output, expected one for each class, at least 2, "
                "for loss 'cross_entropy' (two classes with one output: 'logistic')"
            )
        self._loss = LOSSES[loss]
        self.n_classes = max(2, widths[-1]) if self._loss.classes else None
        self._tanh = activation == "tanh"
        # What the loops need, made once: (weight, bias, workspace name, shape of a row).
        self._layers = tuple(
            (weight, bias, f"act{i}", (width,))
            for i, ((weight, bias), width) in enumerate(zip(names, widths[1:], strict=True))
        )
        self._spaces = Workspaces()

    #: no randomness within a step: no generator is made for it
    uses_rng = False

    @property
    def task(self) -> str:
        """``"classification"`` or ``"regression"``."""
        return "classification" if self._loss.classes else "regression"

    @abstractmethod
    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Initial parameters, which depend on ``rng`` alone."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as plain values."""

    def check(
        self, x_shape: tuple[Any, ...], x_dtype: Any, y_shape: tuple[Any, ...] | None
    ) -> None:
        """Refuse data that this model cannot train on.

        Parameters
        ----------
        x_shape, y_shape : tuple
            Whole shapes; the number of rows may be None or NaN.  No ``y_shape``: only ``x`` counts.
        x_dtype : dtype
            Any real type; it is cast.

        Raises
        ------
        DataError
            Says what was found and what was expected.
        """
        features = self.widths[0]
        if np.dtype(x_dtype).kind not in "biuf":
            raise DataError(f"x: found dtype {np.dtype(x_dtype)}, expected real numbers")
        if len(x_shape) == 0 or math.prod(x_shape[1:]) != features:
            raise DataError(f"x: found shape {x_shape}, expected {features} features in each row")
        if y_shape is None:
            return
        width = 1 if self._loss.classes else self.widths[-1]
        if y_shape[1:] != (width,) and not (width == 1 and len(y_shape) == 1):
            what = "one class index" if self._loss.classes else f"{width} target(s)"
            raise DataError(f"y: found shape {y_shape}, expected {what} in each row")
        rows = x_shape[0], y_shape[0]
        if None not in rows and rows[0] != rows[1] and not any(map(math.isnan, rows)):
            raise DataError(f"y: found {rows[1]} rows, expected {rows[0]}, as x has")

    def loss_and_grads(
        self,
        params: Mapping[str, Array],
        batch: tuple[Array, ...],
        *,
        out: dict[str, Array] | None = None,
        rng: np.random.Generator | None = None,
    ) -> tuple[float, dict[str, Array]]:
        """The mean loss over a batch, and its gradient in closed form.

        Parameters
        ----------
        params : mapping of str to ndarray
            Of this model's dtype; only read.
        batch : (x, y) or (x, y, w)
            ``x``: shape (n, n_features) of any real dtype; more axes are flattened.  ``y``: class
            indices of shape (n,) or (n, 1), or values of shape (n, outputs), (n,) if there is one
            output.  ``w``: weights of shape (n,) or (n, 1); the loss is then
            ``sum(w * loss) / sum(w)``, and zero if all weights are.
        out : dict of str to ndarray, optional
            Where to write the gradients, all of them; in steady state no array is allocated then.
        rng : Generator, optional
            Not used: these models are deterministic.

        Returns
        -------
        loss : float
            With the l2 penalty.  NaN and infinities flow through, without a warning.
        grads : dict of str to ndarray
            ``out``, or new arrays.

        Raises
        ------
        DataError
            If the batch is empty or does not fit the model.
        """
        x, y, w, n = _unpacked(batch)
        ws = self._spaces.like(params[self._layers[0][0]])
        if out is None:
            out = {name: ws.xp.empty_like(params[name]) for pair in self.names for name in pair}
        with quiet():
            x = self._input(ws, x)
            scale: Scale = 1.0 / n if w is None else _weights(ws, w, n, _total(w))
            acts = self._forward(ws, params, x)
            y = targets(self._loss, ws, y, n, self.widths[-1])
            value = self._loss.function(ws, acts[-1], y, scale, True)
            self._backward(ws, params, acts, out)
            if self.l2:
                value += self._penalty(ws, params, out)
        return value, out

    def loss(self, params: Mapping[str, Array], batch: tuple[Array, ...]) -> float:
        """The loss of :meth:`loss_and_grads` alone; large batches take little memory.

        Parameters, errors and meaning are as there.
        """
        x, y, w, n = _unpacked(batch)
        ws = self._spaces.like(params[self._layers[0][0]])
        total = None if w is None else _total(w)
        value = 0.0
        with quiet():
            for start in range(0, n, _ROWS):
                part = slice(start, start + _ROWS)
                x_part = self._input(ws, x[part])
                rows = len(x_part)
                scale: Scale = 1.0 / n if w is None else _weights(ws, w[part], rows, total)
                z = self._forward(ws, params, x_part)[-1]
                y_part = targets(self._loss, ws, y[part], rows, self.widths[-1])
                value += self._loss.function(ws, z, y_part, scale, False)
            if self.l2:
                value += self._penalty(ws, params, None)
        return value

    def predict(self, params: Mapping[str, Array], x: Array) -> Array:
        """Raw scores.

        Parameters
        ----------
        params : mapping of str to ndarray
        x : ndarray, shape (n, n_features)
            Of any real dtype.

        Returns
        -------
        ndarray
            Of this model's dtype: shape (n,) with one output (regression, or the logit of class 1
            of two), else (n, outputs).

        Raises
        ------
        DataError
            If ``x`` does not fit the model.
        """
        ws = self._spaces.like(params[self._layers[0][0]])
        x = _plain(x)
        n, k = len(x), self.widths[-1]
        scores = ws.xp.empty((n, k), ws.dtype)
        with quiet():
            for start in range(0, n, _ROWS):
                part = slice(start, start + _ROWS)
                scores[part] = self._forward(ws, params, self._input(ws, x[part]))[-1]
        return scores.reshape(n) if k == 1 else scores

    def _input(self, ws: Workspace, x: Array) -> Array:
        """``x`` as a matrix of the workspace's kind, copied only if it is not one already."""
        if type(x) is not ws.xp.ndarray:
            x = as_array(x, ws.xp)
        if x.ndim != 2:
            x = x.reshape(len(x), -1)
        n, features = x.shape
        if features != self.widths[0]:
            raise DataError(f"x: found {features} features, expected {self.widths[0]}")
        if x.dtype == ws.dtype and x.flags.c_contiguous:
            return x
        cast = ws.get("input", n, (features,))
        copy_into(cast, x)
        return cast

    def _forward(self, ws: Workspace, params: Mapping[str, Array], x: Array) -> list[Array]:
        """``[x, hidden activations ..., scores]``; all but x are views of the workspace."""
        xp, n, last = ws.xp, len(x), len(self._layers)
        acts = [x]
        for weight, bias, name, tail in self._layers:
            z = ws.get(name, n, tail)
            xp.matmul(acts[-1], params[weight], out=z)
            z += params[bias]
            if len(acts) < last:
                if self._tanh:
                    xp.tanh(z, out=z)
                else:
                    xp.maximum(z, 0, out=z)
            acts.append(z)
        return acts

    def _backward(
        self,
        ws: Workspace,
        params: Mapping[str, Array],
        acts: list[Array],
        grads: Mapping[str, Array],
    ) -> None:
        """Fill ``grads``; ``acts[-1]`` holds the gradient of the scores.  Overwrites ``acts``."""
        xp = ws.xp
        delta = acts[-1]
        for i in reversed(range(len(self._layers))):
            weight, bias, _, _ = self._layers[i]
            below = acts[i]
            xp.matmul(below.T, delta, out=grads[weight])
            delta.sum(axis=0, out=grads[bias])
            if i == 0:
                return
            # Two buffers take turns: one is read while the other is written.
            lower = ws.get(f"delta{i % 2}", *_row_shape(below))
            xp.matmul(delta, params[weight].T, out=lower)
            # Activations are not needed any more: their slopes take their place.
            if self._tanh:
                below *= below
                xp.subtract(1, below, out=below)
            else:
                xp.greater(below, 0, out=below)
            lower *= below
            delta = lower

    def _penalty(
        self, ws: Workspace, params: Mapping[str, Array], grads: Mapping[str, Array] | None
    ) -> float:
        """``l2 / 2`` times the sum of squared weights; its gradient is added to ``grads``."""
        xp, squares = ws.xp, 0.0
        for weight, _ in self.names:
            values = params[weight]
            n, k = values.shape
            step = max(1, _ELEMENTS // k)
            for start in range(0, n, step):
                part = values[start : start + step]
                squares += float(xp.vdot(part, part))
                if grads is not None:
                    term = ws.get("penalty", len(part), (k,))
                    xp.multiply(part, self.l2, out=term)
                    grads[weight][start : start + step] += term
        return 0.5 * self.l2 * squares

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, Dense):
            return NotImplemented
        return self.config() == other.config()

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.config().items())
        return f"{type(self).__name__}({arguments})"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_spaces"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._spaces = Workspaces()


def _dtype_name(dtype: Any) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError:
        return dtype


def _plain(values: Array) -> Array:
    """``values``, or an array if it is a list, a frame or the like."""
    return np.asarray(values) if xp_of(values) is np else values


def _unpacked(batch: Any) -> tuple[Array, Array, Array | None, int]:
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise DataError(f"batch: found {type(batch).__name__}, expected (x, y) or (x, y, w)")
    x, y = _plain(batch[0]), _plain(batch[1])
    w = _plain(batch[2]) if len(batch) == 3 else None
    n = x.shape[0] if x.ndim else 0
    if n == 0:
        raise DataError(f"x: found shape {x.shape}, expected at least one row")
    if y.shape[:1] != (n,):
        raise DataError(f"y: found shape {y.shape}, expected {n} rows, as x has")
    if w is not None and w.shape not in ((n,), (n, 1)):
        raise DataError(f"w: found shape {w.shape}, expected ({n},) or ({n}, 1)")
    return x, y, w, n


def _total(w: Array) -> float:
    return float(w.sum(dtype=np.float64))


def _weights(ws: Workspace, w: Array, n: int, total: float | None) -> Array:
    """``w / total`` of shape (n, 1) in the workspace; zeros if the total is zero."""
    scale = ws.get("weights", n, (1,))
    copy_into(scale, w.reshape(n, 1))
    scale *= 1.0 / total if total else 0.0
    return scale


def _row_shape(array: Array) -> tuple[int, tuple[int, ...]]:
    return array.shape[0], array.shape[1:]
