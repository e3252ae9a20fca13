"""The kinds of optimizers that are an update rule: a function for each stage, and its arguments."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dtrain.arrays import Array, xp_of
from dtrain.checks import arguments, flag, number
from dtrain.errors import SpecError
from dtrain.optim._base import KINDS, Step
from dtrain.schedules import Schedule

if TYPE_CHECKING:
    from dtrain.optim._base import Optimizer

_Constructor = TypeVar("_Constructor", bound=Callable[..., "Optimizer"])


@dataclass(frozen=True)
class Rule:
    """A :class:`~dtrain.optim._base.Kind` whose number of stages is always the same."""

    constructor: Callable[..., Optimizer]  # its signature holds the arguments and their defaults
    passes: tuple[Callable[[Step], np.ndarray | None], ...]
    slots: Callable[[Mapping[str, Any]], Mapping[str, float]]
    arrays: int
    per_block: int
    between: Callable[[np.ndarray, np.ndarray], np.ndarray] | None
    check: Callable[[str, Mapping[str, Any]], None] | None

    def checked(self, key: str, args: Mapping[str, Any]) -> dict[str, Any]:
        defaults = inspect.signature(self.constructor).parameters
        arguments(key, args, defaults)
        values = {
            name: _rule(name, parameter.default)(f"{key}.{name}", args.get(name, parameter.default))
            for name, parameter in defaults.items()
        }
        if self.check is not None:
            self.check(key, values)
        return values

    def initial(self, args: Mapping[str, Any]) -> Mapping[str, float]:
        return self.slots(args)

    def scratch(self, args: Mapping[str, Any]) -> int:
        return self.arrays

    def stages(self, args: Mapping[str, Any]) -> int:
        return len(self.passes)

    def sums(self, args: Mapping[str, Any]) -> int:
        return self.per_block

    def stage(self, index: int, step: Step) -> np.ndarray | None:
        return self.passes[index](step)

    def resolve(
        self, index: int, args: Mapping[str, Any], sums: np.ndarray, variables: np.ndarray
    ) -> np.ndarray:
        assert self.between is not None
        return self.between(sums, variables)


def rule(
    *passes: Callable[[Step], np.ndarray | None],
    slots: Callable[[Mapping[str, Any]], Mapping[str, float]],
    scratch: int = 1,
    sums: int = 0,
    between: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
    check: Callable[[str, Mapping[str, Any]], None] | None = None,
) -> Callable[[_Constructor], _Constructor]:
    """Make the decorated constructor the one of an optimizer of its name.

    Parameters
    ----------
    passes : callable
        One for each stage.  An input is read for the last time before an output that may be the
        same array is written, and scalars are made of the slice's own type, so that float32 stays
        float32.
    slots : callable
        From the arguments: the names of the slots, and what their elements are at first.
    scratch, sums : int
        As :attr:`Optimizer.scratch` and :attr:`Optimizer.sums`.
    between : callable
        As :meth:`Optimizer.resolve`, of sums and variables; between any two stages.
    check : callable
        Refuses arguments that do not go together.
    """

    def register(constructor: _Constructor) -> _Constructor:
        KINDS[constructor.__name__] = Rule(
            constructor, passes, slots, scratch, sums, between, check
        )
        return constructor

    return register


def decay_into(s: Step, work: Array) -> None:
    """Add the L2 penalty to the gradient."""
    if s.args["weight_decay"]:
        xp = xp_of(s.grad)
        xp.multiply(s.params, s.grad.dtype.type(s.args["weight_decay"]), out=work)
        xp.add(s.grad, work, out=s.grad)


def mean_square_into(out: Array, before: Array, grad: Array, decay: float, work: Array) -> None:
    """``out = decay before + (1 - decay) grad^2``."""
    xp, scalar = xp_of(grad), grad.dtype.type
    xp.multiply(grad, scalar(1 - decay), out=work)
    xp.multiply(work, grad, out=work)
    xp.multiply(before, scalar(decay), out=out)
    xp.add(out, work, out=out)


def _lr(key: str, value: Any) -> float | Schedule:
    if isinstance(value, Schedule):
        value = value.to_dict()  # and back: a schedule of the user's own could not travel
    if isinstance(value, Mapping):
        return Schedule.from_dict(value, key)
    try:
        return number(key, value)
    except SpecError as error:
        raise SpecError(f"{error}, or a schedule of dtrain.optim") from None


def _betas(key: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise SpecError(f"{key}: found {value!r}, expected two numbers from 0 up and below 1")
    return tuple(number(f"{key}[{i}]", beta, below=1.0) for i, beta in enumerate(value))


def _lr_power(key: str, value: Any) -> float:
    try:
        power = number(key, value, least=-1.0)
    except SpecError:
        power = math.inf
    if power > 0:
        raise SpecError(f"{key}: found {value!r}, expected a number from -1 to 0")
    return power


#: What an argument may be that is neither True or False nor just a number from 0 up; one name
#: means the same in every optimizer.
_RULES: dict[str, Callable[[str, Any], Any]] = {
    "lr": _lr,
    "lr_power": _lr_power,
    "betas": _betas,
    "alpha": partial(number, below=1.0),
    "eps": partial(number, least=1e-30),
}


def _rule(name: str, default: Any) -> Callable[[str, Any], Any]:
    return _RULES.get(name, flag if isinstance(default, bool) else number)
