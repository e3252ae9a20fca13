"""FTRL-Proximal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain.arrays import Array, xp_of
from dtrain.errors import SpecError
from dtrain.optim._base import Optimizer, Step
from dtrain.optim._rule import rule
from dtrain.schedules import Schedule

#: Steps below this rate are none: ``z`` grows with ``1 / lr``, and would leave float32.
_LEAST_RATE = 1e-20


def _update(s: Step) -> None:
    grad, params, (before, after) = s.grad, s.params, s.scratch
    xp, scalar, args, rate = xp_of(grad), grad.dtype.type, s.args, s.rate()
    total, linear = s.out_slots["accumulator"], s.out_slots["linear"]
    if rate < _LEAST_RATE:
        for out, same in ((total, s.slots["accumulator"]), (linear, s.slots["linear"])):
            out[...] = same
        s.out_params[...] = params
        return
    _root_into(before, s.slots["accumulator"], args["lr_power"])
    xp.multiply(grad, grad, out=after)
    xp.add(s.slots["accumulator"], after, out=total)
    _root_into(after, total, args["lr_power"])
    xp.add(after, scalar(args["beta"]), out=after)
    # before = lr sigma = (beta + root(n)) - (beta + root(n before)) lr / (lr of the step before)
    ratio = rate / _rate_before(s)
    xp.add(before, scalar(args["beta"]), out=before)
    if ratio != 1:
        xp.multiply(before, scalar(ratio), out=before)
    xp.subtract(after, before, out=before)
    xp.multiply(before, scalar(1 / rate), out=before)
    xp.multiply(before, params, out=before)
    xp.add(s.slots["linear"], grad, out=linear)
    xp.subtract(linear, before, out=linear)
    # p = -(z - clip(z, -l1, l1)) / ((beta + root(n)) / lr + 2 l2)
    xp.multiply(after, scalar(1 / rate), out=after)
    xp.add(after, scalar(2 * args["l2"]), out=after)
    xp.clip(linear, scalar(-args["l1"]), scalar(args["l1"]), out=before)
    xp.subtract(before, linear, out=before)
    xp.divide(before, after, out=s.out_params)


def _root_into(out: Array, total: Array, lr_power: float) -> None:
    xp = xp_of(total)
    if lr_power == -0.5:
        xp.sqrt(total, out=out)
    else:
        xp.power(total, total.dtype.type(-lr_power), out=out)


def _rate_before(s: Step) -> float:
    """The rate of the last step before this one that was one; else that of this step."""
    for t in range(s.t - 1, 0, -1):
        if (rate := s.rate(t)) >= _LEAST_RATE:
            return rate
    return s.rate()


def _slots(args: Mapping[str, Any]) -> dict[str, float]:
    return {"accumulator": args["initial_accumulator_value"], "linear": 0.0}


def _check(key: str, args: Mapping[str, Any]) -> None:
    if max(args["beta"], args["initial_accumulator_value"]) < 1e-30:
        # The first step of an element without a gradient would be 0 / 0.
        raise SpecError(
            f"{key}.beta: found {args['beta']!r} with initial_accumulator_value "
            f"{args['initial_accumulator_value']!r}, expected one of them from 1e-30 up"
        )


@rule(_update, slots=_slots, scratch=2, check=_check)
def ftrl(
    lr: float | Schedule = 1e-3,
    lr_power: float = -0.5,
    l1: float = 0.0,
    l2: float = 0.0,
    beta: float = 0.0,
    initial_accumulator_value: float = 0.1,
) -> Optimizer:
    """FTRL-Proximal (McMahan et al., 2013, algorithm 1), for sparse linear models.

    ``s = (beta + n^-lr_power) / lr`` before and after ``n += g^2``;  ``z += g - (s - s before) p;
    p = -(z - clip(z, -l1, l1)) / (s + 2 l2)``: exactly 0 where ``z`` is within ``l1``.

    Defaults, and the factor 2 of ``l2``, are those of ``keras.optimizers.Ftrl``; the paper's
    ``lambda_2`` is ``2 l2``, and it begins with ``n = 0`` and proposes ``beta=1``.  As there,
    ``z`` begins with 0: all values are pulled from where they begin towards 0, those without
    a gradient at once.  With a schedule each ``s`` has its own step's ``lr``, so that without
    penalties a step is one of gradient descent with the rate ``1 / s``; a rate below 1e-20 makes it
    none.

    Parameters
    ----------
    lr : float or Schedule
        The learning rate, the paper's alpha, from 0 up.
    lr_power : float
        How the rate falls with the sum of squared gradients ``n``, from -1 to 0; 0 keeps it.
    l1, l2 : float
        Penalties ``l1 |p| + l2 p^2``, from 0 up.
    beta : float
        From 0 up; makes the first rates smaller.
    initial_accumulator_value : float
        Where ``n`` starts, from 0 up; this or ``beta`` is at least 1e-30.

    Raises
    ------
    SpecError
        Names the argument, what was found and what is allowed.
    """
    return Optimizer("ftrl", dict(locals()))
