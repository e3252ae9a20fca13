"""Adam, and what follows from it: AdamW and LAMB."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from dtrain.arrays import Array, xp_of
from dtrain.optim._base import Optimizer, Step
from dtrain.optim._blocks import norms, norms_of_variables, scale
from dtrain.optim._rule import decay_into, mean_square_into, rule
from dtrain.schedules import Schedule


def _direction_into(s: Step, work: Array, factor: float) -> None:
    """Write the slots, and to ``work`` ``factor m / (sqrt(v) + eps)``, both without their bias."""
    xp, scalar = xp_of(s.grad), s.grad.dtype.type
    beta1, beta2 = s.args["betas"]
    mean, square = s.out_slots["exp_avg"], s.out_slots["exp_avg_sq"]
    xp.multiply(s.grad, scalar(1 - beta1), out=work)
    xp.multiply(s.slots["exp_avg"], scalar(beta1), out=mean)
    xp.add(mean, work, out=mean)
    mean_square_into(square, s.slots["exp_avg_sq"], s.grad, beta2, work)
    # Both bias corrections in the scalars: m' / (sqrt(v) + eps')
    root = math.sqrt(1 - beta2**s.t)
    xp.sqrt(square, out=work)
    xp.add(work, scalar(s.args["eps"] * root), out=work)
    xp.divide(mean, work, out=work)
    xp.multiply(work, scalar(factor * root / (1 - beta1**s.t)), out=work)


def _update(s: Step, *, decoupled: bool) -> None:
    params, (work,) = s.params, s.scratch
    xp, rate, decay = xp_of(params), s.rate(), s.args["weight_decay"]
    if not decoupled:
        decay_into(s, work)
    _direction_into(s, work, rate)
    if decoupled and decay:
        xp.multiply(params, params.dtype.type(1 - rate * decay), out=s.out_params)
        params = s.out_params
    xp.subtract(params, work, out=s.out_params)


def _lamb_direction(s: Step) -> np.ndarray:
    """Leave in the gradient ``u``; return the norms of ``p`` and ``u``."""
    (work,) = s.scratch
    _direction_into(s, work, 1.0)
    s.grad[...] = work
    decay_into(s, work)
    return np.stack([norms(array, s.starts, work) for array in (s.params, s.grad)])


def _lamb_update(s: Step) -> None:
    (work,) = s.scratch
    assert s.factors is not None
    scale(s.grad, s.starts, s.rate() * s.factors, work)
    xp_of(s.grad).subtract(s.params, work, out=s.out_params)


def _trust_ratios(sums: np.ndarray, variables: np.ndarray) -> np.ndarray:
    params, direction = (norms_of_variables(row, variables) for row in sums)
    factors = np.ones(len(variables))
    np.divide(params, direction, out=factors, where=(params > 0) & (direction > 0))
    return factors


def _slots(args: Mapping[str, Any]) -> dict[str, float]:
    return {"exp_avg": 0.0, "exp_avg_sq": 0.0}


@rule(partial(_update, decoupled=False), slots=_slots)
def adam(
    lr: float | Schedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Adam (Kingma and Ba, 2015), as ``torch.optim.Adam``.

    Parameters
    ----------
    lr : float or Schedule
        The learning rate, from 0 up.
    betas : pair of float
        Decay of the running means of gradients and of their squares, from 0 up and below 1.
    eps : float
        Added to the denominator; at least 1e-30, so that it does not vanish in float32.
    weight_decay : float
        L2 penalty, added to the gradient; from 0 up.

    Raises
    ------
    SpecError
        Names the argument, what was found and what is allowed.
    """
    return Optimizer("adam", dict(locals()))


@rule(partial(_update, decoupled=True), slots=_slots)
def adamw(
    lr: float | Schedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as ``torch.optim.AdamW``.

    Parameters
    ----------
    lr : float or Schedule
        The learning rate, from 0 up.
    betas : pair of float
        Decay of the running means of gradients and of their squares, from 0 up and below 1.
    eps : float
        Added to the denominator; at least 1e-30, so that it does not vanish in float32.
    weight_decay : float
        Each step first shrinks the parameters by ``lr * weight_decay``; from 0 up.

    Raises
    ------
    SpecError
        Names the argument, what was found and what is allowed.
    """
    return Optimizer("adamw", dict(locals()))


@rule(_lamb_direction, _lamb_update, slots=_slots, sums=2, between=_trust_ratios)
def lamb(
    lr: float | Schedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> Optimizer:
    """LAMB (You et al., 2020, algorithm 2), for large batches.

    With Adam's ``m`` and ``v``, corrected for their bias, and for each variable by itself:
    ``u = m / (sqrt(v) + eps) + weight_decay p;  p -= lr (|p| / |u|) u``.  The ratio of the
    Euclidean norms is 1 where either is 0.

    Parameters
    ----------
    lr : float or Schedule
        The learning rate, from 0 up: how far, in parts of its norm, a variable moves in a step.
    betas : pair of float
        Decay of the running means of gradients and of their squares, from 0 up and below 1.
    eps : float
        Added to the denominator; at least 1e-30, so that it does not vanish in float32.
    weight_decay : float
        Decoupled from the running means, on all variables; from 0 up.

    Raises
    ------
    SpecError
        Names the argument, what was found and what is allowed.
    """
    return Optimizer("lamb", dict(locals()))
