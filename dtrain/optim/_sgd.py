"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain.arrays import xp_of
from dtrain.errors import SpecError
from dtrain.optim._base import Optimizer, Step
from dtrain.optim._rule import decay_into, rule
from dtrain.schedules import Schedule


def _update(s: Step) -> None:
    grad, (work,) = s.grad, s.scratch
    xp, scalar = xp_of(grad), grad.dtype.type
    decay_into(s, work)
    if s.args["momentum"]:
        momentum, mean = scalar(s.args["momentum"]), s.out_slots["momentum_buffer"]
        xp.multiply(s.slots["momentum_buffer"], momentum, out=mean)
        xp.add(mean, grad, out=mean)
        if s.args["nesterov"]:
            xp.multiply(mean, momentum, out=work)
            xp.add(grad, work, out=grad)
        else:
            grad = mean
    xp.multiply(grad, scalar(s.rate()), out=work)
    xp.subtract(s.params, work, out=s.out_params)


def _slots(args: Mapping[str, Any]) -> dict[str, float]:
    return {"momentum_buffer": 0.0} if args["momentum"] else {}


def _check(key: str, args: Mapping[str, Any]) -> None:
    if args["nesterov"] and not args["momentum"]:
        raise SpecError(f"{key}.nesterov: found True with momentum 0, expected a momentum above 0")


@rule(_update, slots=_slots, check=_check)
def sgd(
    lr: float | Schedule = 1e-3,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Stochastic gradient descent, as ``torch.optim.SGD``.

    ``g += weight_decay p;  m = momentum m + g;  p -= lr m``, or with Nesterov's momentum
    ``p -= lr (g + momentum m)`` (Sutskever et al., 2013).

    Parameters
    ----------
    lr : float or Schedule
        The learning rate, from 0 up.
    momentum : float
        From 0 up; 0 keeps no slot.
    nesterov : bool
        Needs a momentum.
    weight_decay : float
        L2 penalty on all variables, from 0 up.

    Raises
    ------
    SpecError
        Names the argument, what was found and what is allowed.
    """
    return Optimizer("sgd", dict(locals()))
