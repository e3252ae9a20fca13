"""Exact metrics as sums: each batch adds to a metric's sums, and the sums make its value.

Sums over batches follow the batches' order and sums over replicas the fixed tree, so a metric
has the same bits on any number of workers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from dtrain.checks import did_you_mean
from dtrain.errors import DataError, SpecError
from dtrain.tree import tree_sum

Sums = tuple[float, ...]
Weights = np.ndarray | None

#: A metric of one's own: ``f(y, scores)`` of a batch's encoded targets and raw scores.
Function = Callable[[np.ndarray, np.ndarray], Any]


class Metric(NamedTuple):
    """How a metric is summed and what its sums mean.

    ``sums(scores, y, w)`` gets a batch's raw scores, shape (n,) or (n, K), its encoded targets,
    and what each row counts, float64 of shape (n,), or None; the first of the sums is what all
    rows (or elements, for regression) count together.
    """

    task: str
    sums: Callable[[np.ndarray, np.ndarray, Weights], Sums]
    value: Callable[[Sums], float]
    #: whether a larger value is a better one
    larger: bool = False


def class_indices(scores: np.ndarray) -> np.ndarray:
    """The predicted class of each row: the largest logit, or the sign of the one there is."""
    if scores.ndim == 1 or scores.shape[1] == 1:
        return (scores.reshape(len(scores)) > 0).astype(np.int64)
    return np.argmax(scores, axis=1)


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Class probabilities, shape (n, K), of logits of shape (n, K), or (n,) for two classes."""
    if scores.ndim == 1 or scores.shape[1] == 1:
        z = scores.reshape(len(scores))
        one = 0.5 * (1.0 + np.tanh(0.5 * z))
        return np.stack([1.0 - one, one], axis=1).astype(scores.dtype, copy=False)
    shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def total(values: np.ndarray, w: Weights = None) -> float:
    """The sum of what each row has, times what it counts."""
    if w is None:
        return float(values.sum(dtype=np.float64))
    return float(np.dot(values.astype(np.float64, copy=False), w))


def _counted(values: np.ndarray, w: Weights) -> Sums:
    """What the rows count together, and the sum of their values."""
    return float(len(values)) if w is None else total(w), total(values, w)


def _accuracy(scores: np.ndarray, y: np.ndarray, w: Weights) -> Sums:
    return _counted(class_indices(scores) == y.reshape(len(y)), w)


def _log_loss(scores: np.ndarray, y: np.ndarray, w: Weights) -> Sums:
    z = scores.astype(np.float64)
    y = y.reshape(len(y))
    if z.ndim == 1 or z.shape[1] == 1:
        z = z.reshape(len(z))
        losses = np.logaddexp(0.0, np.where(y == 1, -z, z))
    else:
        top = z.max(axis=1)
        losses = top + np.log(np.exp(z - top[:, None]).sum(axis=1)) - z[np.arange(len(y)), y]
    return _counted(losses, w)


def _residuals(
    scores: np.ndarray, y: np.ndarray, w: Weights
) -> tuple[np.ndarray, np.ndarray, Weights]:
    """Targets and residuals of all elements, and what each counts."""
    target = y.astype(np.float64).ravel()
    elements = w if w is None else np.repeat(w, target.size // len(y))
    return target, scores.astype(np.float64).ravel() - target, elements


def _mae(scores: np.ndarray, y: np.ndarray, w: Weights) -> Sums:
    _, residual, w = _residuals(scores, y, w)
    return _counted(np.abs(residual), w)


def _mse(scores: np.ndarray, y: np.ndarray, w: Weights) -> Sums:
    _, residual, w = _residuals(scores, y, w)
    return _counted(np.square(residual), w)


def _r2(scores: np.ndarray, y: np.ndarray, w: Weights) -> Sums:
    target, residual, w = _residuals(scores, y, w)
    # Sums of the target and of its squares: the mean is not known while summing.
    return *_counted(np.square(residual), w), total(target, w), total(np.square(target), w)


def _r2_value(sums: Sums) -> float:
    count, residual, targets, squares = sums
    if count <= 0.0:
        return math.nan
    spread = squares - targets * targets / count
    if spread <= 0.0:
        return 1.0 if residual == 0.0 else 0.0
    return 1.0 - residual / spread


def _mean(sums: Sums) -> float:
    return sums[1] / sums[0] if sums[0] else math.nan


#: The accuracy of the k largest scores, for any k.
_TOP = re.compile(r"top_([1-9]\d*)_accuracy")


def _top(k: int, scores: np.ndarray, y: np.ndarray, w: Weights) -> Sums:
    """Whether fewer than ``k`` classes have a larger score than the right one."""
    y = y.reshape(len(y))
    if scores.ndim == 1 or scores.shape[1] == 1:
        scores = np.stack([np.zeros(len(y), scores.dtype), scores.reshape(len(y))], axis=1)
    right = scores[np.arange(len(y)), y]
    return _counted(np.count_nonzero(scores > right[:, None], axis=1) < k, w)


def _own(name: str, function: Function, scores: np.ndarray, y: np.ndarray, w: Weights) -> Sums:
    """What a function of one's own says of each row, or of all rows of a batch as their mean."""
    found = np.asarray(function(y, scores))
    if found.dtype.kind not in "fiub" or found.shape not in ((), (len(y),)):
        raise DataError(
            f"metric {name}: found {found.dtype} of shape {found.shape}, expected a number for "
            f"each of {len(y)} rows, or one for all"
        )
    if found.ndim:
        return _counted(found, w)
    if w is not None:
        raise DataError(
            f"metric {name}: found one number for all rows, expected one for each, as rows have "
            f"weights"
        )
    return float(len(y)), float(found) * len(y)


#: Add a metric by adding a row.
METRICS: dict[str, Metric] = {
    "accuracy": Metric("classification", _accuracy, _mean, larger=True),
    "log_loss": Metric("classification", _log_loss, _mean),
    "mae": Metric("regression", _mae, _mean),
    "mse": Metric("regression", _mse, _mean),
    "r2": Metric("regression", _r2, _r2_value, larger=True),
}


def check_metrics(wanted: Iterable[Any], task: str) -> tuple[tuple[str, ...], dict[str, Function]]:
    """The names of metrics for ``task``, and those that are functions of one's own, by name.

    Raises a SpecError that lists what is allowed.
    """
    if isinstance(wanted, str):
        raise SpecError(f"metrics: found {wanted!r}, expected a list such as [{wanted!r}]")
    allowed = sorted(name for name, metric in METRICS.items() if metric.task == task)
    names: list[str] = []
    functions: dict[str, Function] = {}
    for metric in wanted:
        name = metric
        if callable(metric):
            name = getattr(metric, "__name__", "")
            if not name.isidentifier() or name in METRICS or name == "loss":
                raise SpecError(
                    f"metrics: found {metric!r}, expected a function with a name of its own"
                )
            functions[name] = metric
        elif name not in allowed and not (
            task == "classification" and isinstance(name, str) and _TOP.fullmatch(name)
        ):
            more = " or top_<k>_accuracy" if task == "classification" else ""
            raise SpecError(
                f"metrics: found {name!r}{did_you_mean(name, allowed)}, expected some of "
                f"{', '.join(allowed)}{more} for a model whose task is {task}, or functions"
            )
        if name in names:
            raise SpecError(f"metrics: found {name!r} twice, expected each once")
        names.append(name)
    return tuple(names), functions


def is_known(name: str) -> bool:
    """Whether it is a metric of dtrain's, not one of a user's own."""
    return name in METRICS or _TOP.fullmatch(name) is not None


def larger_is_better(name: str) -> bool | None:
    """Of a metric, or of ``loss``; None for a function of a user's own, which nobody knows."""
    if name == "loss":
        return False
    if _TOP.fullmatch(name):
        return True
    return METRICS[name].larger if name in METRICS else None


def sums(
    name: str,
    scores: np.ndarray,
    y: np.ndarray,
    w: Weights = None,
    *,
    functions: Mapping[str, Function] = MappingProxyType({}),
) -> Sums:
    """A metric's sums over a batch; DataError if the scores are not those of its rows."""
    if scores.ndim == 0 or len(scores) != len(y):
        raise DataError(f"scores: found shape {scores.shape}, expected {len(y)} rows")
    if w is not None:
        w = w.astype(np.float64).reshape(len(y))
    if name in functions:
        return _own(name, functions[name], scores, y, w)
    top = _TOP.fullmatch(name)
    return METRICS[name].sums(scores, y, w) if top is None else _top(int(top[1]), scores, y, w)


def loss_sums(loss: float, batch: Sequence[np.ndarray]) -> Sums:
    """What the rows of ``(x, y)`` or ``(x, y, w)`` count together, and that times the mean loss."""
    count = float(len(batch[1])) if len(batch) == 2 else total(batch[2])
    return count, count * loss


def mean_loss(sums: Sequence[float]) -> float:
    """The mean of :func:`loss_sums`; NaN if no row counts."""
    return _mean(tuple(sums))


def add(total: Sequence[float] | None, sums: Sums) -> list[float]:
    return list(sums) if total is None else [a + b for a, b in zip(total, sums, strict=True)]


def value(name: str, sums: Sequence[float]) -> float:
    known = METRICS.get(name)
    return (_mean if known is None else known.value)(tuple(sums))


def merge(partials: Mapping[int, Mapping[str, Sequence[float]]], replicas: int) -> dict[str, float]:
    """The values of the metrics, and ``loss``, of the sums of each replica.

    ``loss`` is summed by :func:`loss_sums`.
    """
    names = next(iter(partials.values())).keys()
    values = {}
    for name in names:
        width = len(next(iter(partials.values()))[name])
        sums = [
            tree_sum({i: partial[name][k] for i, partial in partials.items()}, replicas)
            for k in range(width)
        ]
        values[name] = mean_loss(sums) if name == "loss" else value(name, sums)
    return values


def epoch_record(payloads: Sequence[Mapping[str, Any]], replicas: int) -> dict[str, Any]:
    """The record of an epoch of what its hosts reported.

    Those that account for gradients (in sync mode the chief alone) add ``train``: sums of loss,
    weight and samples.  Each adds ``valid``: the sums of each of its replicas, if there are
    validation rows.
    """
    accounts = [p["train"] for p in payloads if p.get("train") is not None]
    train = {key: sum(a[key] for a in accounts) for key in ("loss", "weight", "samples")}
    record: dict[str, Any] = {
        "epoch": payloads[0]["epoch"] + 1,
        "step": max(p["step"] for p in payloads),
        "loss": train["loss"] / train["weight"] if train["weight"] else float("nan"),
        "samples": train["samples"],
    }
    partials = {int(i): sums for p in payloads for i, sums in (p.get("valid") or {}).items()}
    if partials:
        record.update((f"val_{name}", v) for name, v in merge(partials, replicas).items())
    return record
