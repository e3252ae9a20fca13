"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain.arrays import xp_of
from dtrain.optim._base import Optimizer, Step
from dtrain.optim._rule import decay_into, rule
from dtrain.schedules import Schedule


def _update(s: Step) -> None:
    grad, total, (work,) = s.grad, s.out_slots["sum"], s.scratch
    xp, scalar = xp_of(grad), grad.dtype.type
    decay_into(s, work)
    xp.multiply(grad, grad, out=work)
    xp.add(s.slots["sum"], work, out=total)
    xp.sqrt(total, out=work)
    xp.add(work, scalar(s.args["eps"]), out=work)
    xp.divide(grad, work, out=work)
    xp.multiply(work, scalar(s.rate() / (1 + (s.t - 1) * s.args["lr_decay"])), out=work)
    xp.subtract(s.params, work, out=s.out_params)


def _slots(args: Mapping[str, Any]) -> dict[str, float]:
    return {"sum": args["initial_accumulator_value"]}


@rule(_update, slots=_slots)
def adagrad(
    lr: float | Schedule = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> Optimizer:
    """Adagrad (Duchi, Hazan and Singer, 2011), as ``torch.optim.Adagrad``.

    ``g += weight_decay p;  s += g^2;  p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)``.

    Parameters
    ----------
    lr : float or Schedule
        The learning rate, from 0 up.
    lr_decay : float
        From 0 up; on top of a schedule, if ``lr`` is one.
    weight_decay : float
        L2 penalty, added to the gradient; from 0 up.
    initial_accumulator_value : float
        Where the sums ``s`` of squared gradients start, from 0 up.
    eps : float
        Added to the denominator; at least 1e-30, so that it does not vanish in float32.

    Raises
    ------
    SpecError
        Names the argument, what was found and what is allowed.
    """
    return Optimizer("adagrad", dict(locals()))
