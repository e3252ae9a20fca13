"""RMSprop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dtrain.arrays import xp_of
from dtrain.optim._base import Optimizer, Step
from dtrain.optim._rule import decay_into, mean_square_into, rule
from dtrain.schedules import Schedule


def _update(s: Step) -> None:
    grad, square, (work, least) = s.grad, s.out_slots["square_avg"], s.scratch
    xp, scalar, alpha = xp_of(grad), grad.dtype.type, s.args["alpha"]
    decay_into(s, work)
    mean_square_into(square, s.slots["square_avg"], grad, alpha, work)
    if s.args["centered"]:
        mean = s.out_slots["grad_avg"]
        xp.subtract(grad, s.slots["grad_avg"], out=work)
        xp.multiply(work, scalar(1 - alpha), out=work)
        xp.add(s.slots["grad_avg"], work, out=mean)
        xp.multiply(mean, mean, out=work)
        xp.subtract(square, work, out=work)
        xp.multiply(square, np.finfo(scalar).eps, out=least)
        xp.maximum(work, least, out=work)
        xp.sqrt(work, out=work)
    else:
        xp.sqrt(square, out=work)
    xp.add(work, scalar(s.args["eps"]), out=work)
    xp.divide(grad, work, out=work)
    if s.args["momentum"]:
        moving = s.out_slots["momentum_buffer"]
        xp.multiply(s.slots["momentum_buffer"], scalar(s.args["momentum"]), out=moving)
        xp.add(moving, work, out=moving)
        xp.multiply(moving, scalar(s.rate()), out=work)
    else:
        xp.multiply(work, scalar(s.rate()), out=work)
    xp.subtract(s.params, work, out=s.out_params)


def _slots(args: Mapping[str, Any]) -> dict[str, float]:
    kept = {"square_avg": True, "grad_avg": args["centered"], "momentum_buffer": args["momentum"]}
    return {name: 0.0 for name, is_kept in kept.items() if is_kept}


@rule(_update, slots=_slots, scratch=2)
def rmsprop(
    lr: float | Schedule = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> Optimizer:
    """RMSprop (Tieleman and Hinton, 2012; centered: Graves, 2013), as ``torch.optim.RMSprop``.

    ``g += weight_decay p;  v = alpha v + (1 - alpha) g^2;  b = momentum b + g / (sqrt(v) + eps);
    p -= lr b``; centered, the square of the running mean of ``g`` is taken from ``v``.

    Parameters
    ----------
    lr : float or Schedule
        The learning rate, from 0 up.
    alpha : float
        Decay of the running mean of squared gradients, from 0 up and below 1.
    eps : float
        Added to the denominator; at least 1e-30, so that it does not vanish in float32.
    weight_decay : float
        L2 penalty, added to the gradient; from 0 up.
    momentum : float
        From 0 up; 0 keeps no slot.
    centered : bool
        Divide by the standard deviation of the gradient.  Its square is a difference and, where
        gradients hardly change, nothing but rounding error, of either sign; so that no NaN comes
        of it, as it does in PyTorch, it is not let below the rounding error of ``v``.

    Raises
    ------
    SpecError
        Names the argument, what was found and what is allowed.
    """
    return Optimizer("rmsprop", dict(locals()))
