"""Loss functions: the value, and the gradient with respect to the raw scores, in closed form.

Every function has the signature ``loss(ws, z, y, scale, delta) -> float``:

- ``z``: raw scores, shape (n, k), C-contiguous; overwritten, with the gradient if ``delta``;
- ``y``: targets, prepared by :func:`targets`; may be overwritten;
- ``scale``: what each row counts, a float (1 / n), or an array of shape (n, 1) (w / sum(w));
- it returns ``sum(scale * loss of the row)``; a row's loss is a mean over its k elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from dtrain.arrays import Array, as_array, copy_into
from dtrain.errors import DataError
from dtrain.models._workspace import Workspace

#: A float, or an array of shape (n, 1).
Scale: TypeAlias = Any


@dataclass(frozen=True)
class Loss:
    """A loss function, and what its targets are: class indices or real values."""

    function: Callable[[Workspace, Array, Array, Scale, bool], float]
    classes: bool


def targets(loss: Loss, ws: Workspace, y: Array, n: int, k: int) -> Array:
    """The targets of a batch in the workspace, checked.

    Returns
    -------
    ndarray
        For cross-entropy, the class indices of shape (n,), int64; else shape (n, k).

    Raises
    ------
    DataError
        If shape or type do not fit, or a class index is out of range.
    """
    y = y if type(y) is ws.xp.ndarray else as_array(y, ws.xp)
    width = 1 if loss.classes else k
    if y.shape != (n, width) and not (width == 1 and y.shape == (n,)):
        raise DataError(f"y: found shape {y.shape}, expected {_shapes(n, width)}")
    if loss.classes:
        n_classes = 2 if k == 1 else k
        y = _indices(ws, y, n, n_classes)
        if k > 1:
            return y
    values = ws.get("targets", n, (k,))
    copy_into(values, y.reshape(n, k))
    return values


def _indices(ws: Workspace, y: Array, n: int, n_classes: int) -> Array:
    if y.dtype.kind not in "iub":
        raise DataError(f"y: found {y.dtype}, expected class indices of an integer type")
    index = ws.get("index", n, (), np.int64)
    copy_into(index, y.reshape(n))
    # As unsigned numbers the negative ones are the largest: one pass sees both ends.
    if int(index.view(np.uint64).max()) >= n_classes:
        raise DataError(
            f"y: found class indices from {index.min()} to {index.max()}, "
            f"expected 0 to {n_classes - 1}"
        )
    return index


def _shapes(n: int, width: int) -> str:
    return f"({n},) or ({n}, 1)" if width == 1 else f"({n}, {width})"


def squared(ws: Workspace, z: Array, y: Array, scale: Scale, delta: bool) -> float:
    """``(z - y)**2``, as ``torch.nn.MSELoss``."""
    xp, k = ws.xp, z.shape[1]
    xp.subtract(z, y, out=z)
    if isinstance(scale, float):
        value = float(xp.vdot(z, z)) * scale / k
        if delta:
            xp.multiply(z, 2 * scale / k, out=z)
        return value
    scaled = xp.multiply(z, scale, out=y)
    value = float(xp.vdot(scaled, z)) / k
    if delta:
        xp.multiply(scaled, 2 / k, out=z)
    return value


def huber(ws: Workspace, z: Array, y: Array, scale: Scale, delta: bool) -> float:
    """``d**2 / 2`` for ``abs(d) < 1``, else ``abs(d) - 1/2``; as ``torch.nn.HuberLoss``."""
    xp = ws.xp
    xp.subtract(z, y, out=z)
    slope = ws.get("loss0", *_split(z))
    xp.maximum(z, -1, out=slope)
    xp.minimum(slope, 1, out=slope)
    # Both branches are slope * (d - slope / 2).
    row = xp.multiply(slope, -0.5, out=y)
    row += z
    row *= slope
    value = _sum(row, scale)
    if delta:
        _scaled(xp, slope, scale, z)
    return value


def poisson(ws: Workspace, z: Array, y: Array, scale: Scale, delta: bool) -> float:
    """``exp(z) - y z``, as ``torch.nn.PoissonNLLLoss()``."""
    xp = ws.xp
    mean, row = ws.get("loss0", *_split(z)), ws.get("loss1", *_split(z))
    xp.exp(z, out=mean)
    xp.multiply(y, z, out=row)
    xp.subtract(mean, row, out=row)
    value = _sum(row, scale)
    if delta:
        mean -= y
        _scaled(xp, mean, scale, z)
    return value


def logistic(ws: Workspace, z: Array, y: Array, scale: Scale, delta: bool) -> float:
    """``log(1 + exp(z)) - y z`` for y in {0, 1}, as ``torch.nn.BCEWithLogitsLoss``."""
    xp = ws.xp
    e, row, other = (ws.get(f"loss{i}", *_split(z)) for i in range(3))
    # exp of a number that is never positive cannot overflow.
    xp.absolute(z, out=e)
    xp.negative(e, out=e)
    xp.exp(e, out=e)
    xp.maximum(z, 0, out=row)
    row -= xp.multiply(y, z, out=other)
    row += xp.log1p(e, out=other)
    value = _sum(row, scale)
    if delta:
        # The sigmoid is 1 / (1 + e) from zero up, else e / (1 + e).
        xp.heaviside(z, 1, out=other)
        xp.maximum(e, other, out=other)
        e += 1
        other /= e
        other -= y
        _scaled(xp, other, scale, z)
    return value


def cross_entropy(ws: Workspace, z: Array, y: Array, scale: Scale, delta: bool) -> float:
    """``log(sum(exp(z))) - z[y]``, as ``torch.nn.CrossEntropyLoss``."""
    xp, (n, k) = ws.xp, z.shape
    total, picked, row = ws.get("total", n, (1,)), ws.get("picked", n), ws.get("row", n, (1,))
    z.max(axis=1, keepdims=True, out=total)
    z -= total
    flat = z.reshape(-1)
    y += ws.row_starts(n, k)
    _take(xp, flat, y, picked)
    xp.exp(z, out=z)
    z.sum(axis=1, keepdims=True, out=total)
    xp.log(total, out=row)
    row -= picked.reshape(n, 1)
    value = _sum(row, scale)
    if delta:
        # The mean's factor goes in with the division, so that z is passed over once.
        xp.divide(scale, total, out=total)
        z *= total
        _take(xp, flat, y, picked)
        picked -= scale if isinstance(scale, float) else scale.reshape(n)
        flat[y] = picked
    return value


LOSSES: dict[str, Loss] = {
    "squared": Loss(squared, classes=False),
    "huber": Loss(huber, classes=False),
    "poisson": Loss(poisson, classes=False),
    "logistic": Loss(logistic, classes=True),
    "cross_entropy": Loss(cross_entropy, classes=True),
}


def _split(z: Array) -> tuple[int, tuple[int, ...]]:
    return z.shape[0], z.shape[1:]


def _sum(rows: Array, scale: Scale) -> float:
    """The sum over rows of scale times the row's mean; overwrites ``rows``."""
    if isinstance(scale, float):
        return float(rows.sum()) * scale / rows.shape[1]
    rows *= scale
    return float(rows.sum()) / rows.shape[1]


def _scaled(xp: ModuleType, slope: Array, scale: Scale, out: Array) -> None:
    """``slope * scale / k`` into ``out``."""
    k = out.shape[1]
    xp.multiply(slope, scale / k if isinstance(scale, float) else scale, out=out)
    if k > 1 and not isinstance(scale, float):
        out /= k


def _take(xp: ModuleType, flat: Array, index: Array, out: Array) -> None:
    # Indices were checked; NumPy's other modes would buffer `out`, and CuPy knows no modes.
    if xp is np:
        flat.take(index, out=out, mode="clip")
    else:
        flat.take(index, out=out)
