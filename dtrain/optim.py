"""Optimizers: pairs of pure functions that work on any slice of the flat parameters.

All arithmetic is elementwise and written with ``out=``, so a shard can run it in chunks, into the
same arrays (asynchronous) or into others (a second buffer), and always gets the same bits.
Definitions, argument names and defaults are those of ``torch.optim``.

To add an optimizer: an update function, a constructor, and its entry in ``_KINDS``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any, TypeAlias

import numpy as np

from dtrain.arrays import Array, aligned_bytes, quiet, xp_of
from dtrain.checks import arguments, choice, flag, number
from dtrain.errors import SpecError

__all__ = ["Optimizer", "adam", "adamw", "sgd"]

#: Elements that are updated at a time: the several passes of an update then stay in the L2 cache.
CHUNK = 32768

Value: TypeAlias = float | bool | tuple[float, ...]
Slots: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True, repr=False)
class Optimizer:
    """An update rule and its hyper-parameters; it holds no state.

    Make one with :func:`sgd`, :func:`adam` or :func:`adamw`.

    Parameters
    ----------
    kind : str
        The name of its constructor.
    args : mapping
        That constructor's arguments; what is left out has its default.

    Raises
    ------
    SpecError
        Names the argument, what was found and what is allowed.
    """

    kind: str
    args: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choice("optimizer", self.kind, _KINDS)
        object.__setattr__(self, "args", MappingProxyType(_checked(self.kind, self.args)))

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of its state arrays, each as large as the parameters and zero at first."""
        return _KINDS[self.kind].slots(self.args)

    @property
    def scratch(self) -> int:
        """How many scratch arrays :meth:`update` needs, each at least as long as the slice."""
        return _KINDS[self.kind].scratch

    def init(self, params: Array) -> dict[str, Array]:
        """The slots before the first step: zeros like ``params`` for each of :attr:`slots`."""
        xp = xp_of(params)
        return {name: xp.zeros_like(params) for name in self.slots}

    def update(
        self,
        t: int,
        grad: Array,
        params: Array,
        slots: Slots,
        out_params: Array,
        out_slots: Slots,
        scratch: Sequence[Array],
    ) -> None:
        """Write the parameters and slots of step ``t``, for one slice.

        Nothing is allocated, and the result does not depend on how the parameters are sliced.

        Parameters
        ----------
        t : int
            The number of this step; the first is 1.
        grad : ndarray, shape (n,)
            float32 or float64, as all arrays here.  It may be overwritten.
        params, slots : ndarray and mapping of str to ndarray, shape (n,)
            The state before the step.
        out_params, out_slots : ndarray and mapping of str to ndarray, shape (n,)
            Where the state after it goes: other arrays, or the very same ones.
        scratch : sequence of ndarray, shape (>= n,)
            :attr:`scratch` arrays or more (see :func:`make_scratch`).

        Raises
        ------
        ValueError
            If ``t`` is below 1.
        """
        if t < 1:
            raise ValueError(f"t: found {t}, expected the number of a step, from 1 up")
        scratch = [array[: grad.size] for array in scratch[: self.scratch]]
        with quiet():
            _KINDS[self.kind].update(
                self.args, t, grad, params, slots, out_params, out_slots, scratch
            )

    def to_dict(self) -> dict[str, Any]:
        """``{"kind": ..., **args}`` of plain values, as written in a job's TOML file."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in self.args.items()}
        return {"kind": self.kind, **plain}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Optimizer:
        """The optimizer that :meth:`to_dict` described.

        Raises
        ------
        SpecError
            As the constructor does.
        """
        rest = dict(values)
        return cls(rest.pop("kind", None), rest)

    def __hash__(self) -> int:
        return hash((self.kind, tuple(self.args.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return Optimizer, (self.kind, dict(self.args))

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{k}={v!r}' for k, v in self.args.items())})"


def sgd(
    lr: float = 1e-3, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
) -> Optimizer:
    """Stochastic gradient descent, as ``torch.optim.SGD``.

    ``g += weight_decay p;  m = momentum m + g;  p -= lr m``, or with Nesterov's momentum
    ``p -= lr (g + momentum m)`` (Sutskever et al., 2013).

    Parameters
    ----------
    lr : float
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


def adam(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Adam (Kingma and Ba, 2015), as ``torch.optim.Adam``.

    Parameters
    ----------
    lr : float
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


def adamw(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as ``torch.optim.AdamW``.

    Parameters
    ----------
    lr : float
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


def from_name(kind: str, **args: Any) -> Optimizer:
    """The optimizer of that name, as in a job's TOML file.

    Raises
    ------
    SpecError
        Lists the allowed names, or the allowed arguments of ``kind``.
    """
    return Optimizer(kind, args)


def make_scratch(
    optimizer: Optimizer, dtype: str, chunk: int = CHUNK, xp: ModuleType = np
) -> tuple[Array, ...]:
    """The scratch arrays of :meth:`Optimizer.update`, for slices of up to ``chunk`` elements."""
    nbytes = chunk * np.dtype(dtype).itemsize
    return tuple(aligned_bytes(nbytes, xp).view(dtype) for _ in range(optimizer.scratch))


def apply(
    optimizer: Optimizer,
    t: int,
    grad: Array,
    params: Array,
    slots: Slots,
    out_params: Array,
    out_slots: Slots,
    scratch: Sequence[Array],
    chunk: int = CHUNK,
) -> None:
    """:meth:`Optimizer.update` on a long slice, ``chunk`` elements at a time.

    Parameters are as there; the scratch arrays need be no longer than ``chunk``.
    """
    for start in range(0, grad.size, chunk):
        part = slice(start, start + chunk)
        optimizer.update(
            t,
            grad[part],
            params[part],
            {name: slots[name][part] for name in slots},
            out_params[part],
            {name: out_slots[name][part] for name in out_slots},
            scratch,
        )


def _rate(args: Mapping[str, Any], t: int) -> float:
    """The learning rate of step ``t``: the one place that knows."""
    return float(args["lr"])


# In the updates an input is read for the last time before an output that may be the same array is
# written.  Scalars are made of the slice's own type, so that float32 stays float32.


def _sgd(
    args: Mapping[str, Any],
    t: int,
    grad: Array,
    params: Array,
    slots: Slots,
    out_params: Array,
    out_slots: Slots,
    scratch: Sequence[Array],
) -> None:
    xp, scalar, (work,) = xp_of(grad), grad.dtype.type, scratch
    _decay_into(grad, params, args["weight_decay"], work)
    if args["momentum"]:
        momentum, mean = scalar(args["momentum"]), out_slots["momentum_buffer"]
        xp.multiply(slots["momentum_buffer"], momentum, out=mean)
        xp.add(mean, grad, out=mean)
        if args["nesterov"]:
            xp.multiply(mean, momentum, out=work)
            xp.add(grad, work, out=grad)
        else:
            grad = mean
    xp.multiply(grad, scalar(_rate(args, t)), out=work)
    xp.subtract(params, work, out=out_params)


def _adam(
    args: Mapping[str, Any],
    t: int,
    grad: Array,
    params: Array,
    slots: Slots,
    out_params: Array,
    out_slots: Slots,
    scratch: Sequence[Array],
    *,
    decoupled: bool,
) -> None:
    xp, scalar, (work,) = xp_of(grad), grad.dtype.type, scratch
    (beta1, beta2), rate, decay = args["betas"], _rate(args, t), args["weight_decay"]
    mean, square = out_slots["exp_avg"], out_slots["exp_avg_sq"]
    if not decoupled:
        _decay_into(grad, params, decay, work)
    xp.multiply(grad, scalar(1 - beta1), out=work)
    xp.multiply(slots["exp_avg"], scalar(beta1), out=mean)
    xp.add(mean, work, out=mean)
    xp.multiply(grad, scalar(1 - beta2), out=work)
    xp.multiply(work, grad, out=work)
    xp.multiply(slots["exp_avg_sq"], scalar(beta2), out=square)
    xp.add(square, work, out=square)
    # Both bias corrections in the scalars: p -= lr' m / (sqrt(v) + eps')
    root = math.sqrt(1 - beta2**t)
    xp.sqrt(square, out=work)
    xp.add(work, scalar(args["eps"] * root), out=work)
    xp.divide(mean, work, out=work)
    xp.multiply(work, scalar(rate * root / (1 - beta1**t)), out=work)
    if decoupled and decay:
        xp.multiply(params, scalar(1 - rate * decay), out=out_params)
        params = out_params
    xp.subtract(params, work, out=out_params)


def _decay_into(grad: Array, params: Array, decay: float, work: Array) -> None:
    if decay:
        xp = xp_of(grad)
        xp.multiply(params, grad.dtype.type(decay), out=work)
        xp.add(grad, work, out=grad)


@dataclass(frozen=True)
class _Kind:
    constructor: Callable[..., Optimizer]  # its signature holds the arguments and their defaults
    update: Callable[..., None]
    slots: Callable[[Mapping[str, Any]], tuple[str, ...]]
    scratch: int


_KINDS: dict[str, _Kind] = {
    "sgd": _Kind(sgd, _sgd, lambda args: ("momentum_buffer",) if args["momentum"] else (), 1),
    "adam": _Kind(adam, partial(_adam, decoupled=False), lambda _: ("exp_avg", "exp_avg_sq"), 1),
    "adamw": _Kind(adamw, partial(_adam, decoupled=True), lambda _: ("exp_avg", "exp_avg_sq"), 1),
}


def _betas(key: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise SpecError(f"{key}: found {value!r}, expected two numbers from 0 up and below 1")
    return tuple(number(f"{key}[{i}]", beta, below=1.0) for i, beta in enumerate(value))


#: What each argument may be; one name means the same in every optimizer.
_RULES: dict[str, Callable[[str, Any], Value]] = {
    "lr": number,
    "momentum": number,
    "nesterov": flag,
    "weight_decay": number,
    "betas": _betas,
    "eps": partial(number, least=1e-30),
}


def _checked(kind: str, args: Mapping[str, Any]) -> dict[str, Value]:
    defaults = inspect.signature(_KINDS[kind].constructor).parameters
    arguments(kind, args, defaults)
    values = {
        name: _RULES[name](f"{kind}.{name}", args.get(name, parameter.default))
        for name, parameter in defaults.items()
    }
    if values.get("nesterov") and not values.get("momentum"):
        raise SpecError(f"{kind}.nesterov: found True with momentum 0, expected a momentum above 0")
    return values
