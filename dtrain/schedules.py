"""Learning rates that change with the step: pure, frozen, and plain enough for JSON and TOML.

Where ``torch.optim.lr_scheduler`` has the same, they agree; each class names its twin there.

To add a schedule: a dataclass with ``_rate``, its name in ``_KINDS``, and in ``_RULES`` what a new
argument may be.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any

from dtrain.checks import arguments, choice, flag, number
from dtrain.errors import SpecError
from dtrain.spec import whole

__all__ = ["Schedule", "exponential", "linear", "piecewise", "warmup_cosine"]


@dataclass(frozen=True)
class Schedule:
    """What all schedules share; any of them may be the ``lr`` of any optimizer.

    Raises
    ------
    SpecError
        When made: names the argument, what was found and what is allowed.
    """

    def __post_init__(self) -> None:
        for name, value in _checked(type(self), self.kind, vars(self)).items():
            object.__setattr__(self, name, value)

    @property
    def kind(self) -> str:
        """Its name in this module."""
        return type(self).__name__

    def __call__(self, step: int) -> float:
        """The learning rate of a step.

        Parameters
        ----------
        step : int
            How many steps came before it: the first, which optimizers call ``t=1``, is 0.

        Raises
        ------
        ValueError
            If ``step`` is below 0.
        """
        if step < 0:
            raise ValueError(f"step: found {step}, expected the number of a step, from 0 up")
        return float(self._rate(int(step)))

    def _rate(self, step: int) -> float:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """``{"kind": ..., **arguments}`` of plain values, as written in a job's TOML file."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        return {"kind": self.kind, **plain}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], key: str = "schedule") -> Schedule:
        """The schedule that :meth:`to_dict` described.

        Parameters
        ----------
        values : mapping
            What is left out has its default.
        key : str
            What errors call the whole; they call an argument ``key.argument``.

        Raises
        ------
        SpecError
            As the constructors do; also for an unknown kind, or an argument missing or unknown.
        """
        rest = dict(values)
        made = _KINDS[choice(f"{key}.kind", rest.pop("kind", None), _KINDS)]
        return made(**_checked(made, key, rest))


@dataclass(frozen=True)
class warmup_cosine(Schedule):
    """A line from ``start`` up to ``peak``, then half a cosine down to ``final``.

    Reaches the peak at ``step = warmup_steps``, the final value at ``total_steps``, and stays
    there.  Without a warm-up it is SGDR's annealing (Loshchilov and Hutter, 2017) without restarts,
    as ``CosineAnnealingLR``.

    Parameters
    ----------
    peak : float
        The highest learning rate, from 0 up.
    warmup_steps : int
        From 0 up.
    total_steps : int
        With the warm-up, which is shorter.
    final, start : float
        From 0 up.  With ``start=0`` the first step leaves the parameters as they are.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    final: float = 0.0
    start: float = 0.0

    def _rate(self, step: int) -> float:
        if step < self.warmup_steps:
            return _between(self.start, self.peak, step / self.warmup_steps)
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return _between(self.final, self.peak, (1 + math.cos(math.pi * min(done, 1.0))) / 2)


@dataclass(frozen=True)
class exponential(Schedule):
    """``lr * decay ** (step / every)``, as ``ExponentialLR`` with ``every=1``.

    Parameters
    ----------
    lr : float
        The learning rate of step 0, from 0 up.
    decay : float
        The factor per ``every`` steps, from 0 up; above 1 the rate grows.
    every : int
        Steps, from 1 up.
    staircase : bool
        Let the rate change only after every ``every`` steps, all at once, as ``StepLR``.
    """

    lr: float
    decay: float
    every: int = 1
    staircase: bool = False

    def _rate(self, step: int) -> float:
        times = step // self.every if self.staircase else step / self.every
        try:
            return self.lr * self.decay**times
        except OverflowError:  # floats grow to infinity, but Python's power refuses
            return self.lr and math.inf


@dataclass(frozen=True)
class piecewise(Schedule):
    """Constant between boundaries; at a boundary the next value holds already (``MultiStepLR``).

    Parameters
    ----------
    boundaries : sequence of int
        Steps from 1 up, each above the one before.
    values : sequence of float
        Learning rates from 0 up: one before the first boundary, and one from each boundary on.
    """

    boundaries: tuple[int, ...]
    values: tuple[float, ...]

    def _rate(self, step: int) -> float:
        return self.values[bisect_right(self.boundaries, step)]


@dataclass(frozen=True)
class linear(Schedule):
    """A line from ``start`` at step 0 to ``stop`` at step ``steps``, then ``stop`` (``LinearLR``).

    Parameters
    ----------
    start, stop : float
        Learning rates, from 0 up.
    steps : int
        From 1 up.
    """

    start: float
    stop: float
    steps: int

    def _rate(self, step: int) -> float:
        return _between(self.start, self.stop, min(step / self.steps, 1.0))


def _between(a: float, b: float, part: float) -> float:
    """``part`` of the way from ``a`` to ``b``; exact at both ends."""
    return (1 - part) * a + part * b


_KINDS: dict[str, type[Schedule]] = {
    made.__name__: made for made in (warmup_cosine, exponential, piecewise, linear)
}


def _items(each: Callable[[str, Any], Any], key: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list):
        raise SpecError(f"{key}: found {value!r}, expected a list of numbers")
    return tuple(each(f"{key}[{i}]", item) for i, item in enumerate(value))


#: What each argument may be; one name means the same in every schedule.
_RULES: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("lr", "peak", "final", "start", "stop", "decay"), number),
    **dict.fromkeys(("total_steps", "steps", "every"), whole),
    "warmup_steps": partial(whole, least=0),
    "staircase": flag,
    "boundaries": partial(_items, whole),
    "values": partial(_items, number),
}


def _checked(made: type[Schedule], key: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a schedule in their plain form; errors name them ``key.argument``."""
    defaults = {field.name: field.default for field in fields(made)}
    arguments(key, args, defaults)
    values = {}
    for name, default in defaults.items():
        value = args.get(name, default)
        if value is MISSING:
            needed = ", ".join(repr(n) for n, d in defaults.items() if d is MISSING)
            raise SpecError(f"{key}: found no argument {name!r}, expected at least {needed}")
        values[name] = _RULES[name](f"{key}.{name}", value)
    if made is warmup_cosine and values["total_steps"] <= values["warmup_steps"]:
        raise SpecError(
            f"{key}.total_steps: found {values['total_steps']} with {values['warmup_steps']} steps "
            "of warm-up, expected more steps than those"
        )
    if made is piecewise:
        _fit(key, values["boundaries"], values["values"])
    return values


def _fit(key: str, boundaries: tuple[int, ...], values: tuple[float, ...]) -> None:
    if any(b <= a for a, b in pairwise(boundaries)):
        raise SpecError(
            f"{key}.boundaries: found {list(boundaries)}, expected each above the one before"
        )
    if len(values) != len(boundaries) + 1:
        raise SpecError(
            f"{key}.values: found {len(values)} with {len(boundaries)} boundaries, expected one "
            "more than there are boundaries"
        )
