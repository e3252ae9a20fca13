"""Optimizers: pairs of pure functions that work on any slice of the flat parameters.

All arithmetic is elementwise and written with ``out=``, so a shard can run it in chunks, into the
same arrays (asynchronous) or into others (a second buffer), and always gets the same bits.
Definitions, argument names and defaults are those of ``torch.optim``.

To add an optimizer: an update function, a constructor, and its entry in ``_KINDS``; and in
``_RULES`` an argument that is neither True or False nor just a number from 0 up.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dtrain.arrays import Array, aligned_bytes, quiet, xp_of
from dtrain.checks import arguments, choice, flag, number
from dtrain.errors import SpecError
from dtrain.schedules import Schedule, exponential, linear, piecewise, warmup_cosine

__all__ = [
    "Optimizer",
    "Schedule",
    "adagrad",
    "adam",
    "adamw",
    "exponential",
    "linear",
    "piecewise",
    "rmsprop",
    "sgd",
    "warmup_cosine",
]

#: Elements that are updated at a time: the several passes of an update then stay in the L2 cache.
CHUNK = 32768

Value: TypeAlias = float | bool | tuple[float, ...] | Schedule
Slots: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True, repr=False)
class Optimizer:
    """An update rule and its hyper-parameters; it holds no state.

    Make one with :func:`sgd`, :func:`adam`, :func:`adamw`, :func:`adagrad` or :func:`rmsprop`.

    Parameters
    ----------
    kind : str
        The name of its constructor.
    args : mapping
        That constructor's arguments; what is left out has its default.  ``lr`` may be a schedule,
        or the mapping that describes one.

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
        """Names of its state arrays, each as large as the parameters."""
        return tuple(self.initial)

    @property
    def initial(self) -> Mapping[str, float]:
        """What all elements of each of :attr:`slots` are before the first step; 0 in most."""
        return _KINDS[self.kind].slots(self.args)

    @property
    def scratch(self) -> int:
        """How many scratch arrays :meth:`update` needs, each at least as long as the slice."""
        return _KINDS[self.kind].scratch

    def init(self, params: Array) -> dict[str, Array]:
        """The slots before the first step; of ``params`` only length, dtype and device matter.

        Returns
        -------
        dict of str to ndarray, shape (n,)
            An aligned array for each of :attr:`slots`, with its :attr:`initial` value.
        """
        slots = {}
        for name, value in self.initial.items():
            slots[name] = aligned_bytes(params.nbytes, xp_of(params)).view(params.dtype)
            if value:  # else it is zero already, and its pages need not be touched
                slots[name].fill(value)
        return slots

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
        lr: Any = self.args["lr"]
        rate = lr(t - 1) if isinstance(lr, Schedule) else lr
        scratch = [array[: grad.size] for array in scratch[: self.scratch]]
        step = _Step(self.args, t, rate, grad, params, slots, out_params, out_slots, scratch)
        with quiet():
            _KINDS[self.kind].update(step)

    def to_dict(self) -> dict[str, Any]:
        """``{"kind": ..., **args}`` of plain values, as written in a job's TOML file."""
        return {"kind": self.kind, **{k: _plain(v) for k, v in self.args.items()}}

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


class _Step(NamedTuple):
    """What an update function is told: see :meth:`Optimizer.update`."""

    args: Mapping[str, Any]
    t: int
    rate: float  # the learning rate of this step
    grad: Array
    params: Array
    slots: Slots
    out_params: Array
    out_slots: Slots
    scratch: Sequence[Array]


# In the updates an input is read for the last time before an output that may be the same array is
# written.  Scalars are made of the slice's own type, so that float32 stays float32.


def _sgd(s: _Step) -> None:
    grad, (work,) = s.grad, s.scratch
    xp, scalar = xp_of(grad), grad.dtype.type
    _decay_into(s, work)
    if s.args["momentum"]:
        momentum, mean = scalar(s.args["momentum"]), s.out_slots["momentum_buffer"]
        xp.multiply(s.slots["momentum_buffer"], momentum, out=mean)
        xp.add(mean, grad, out=mean)
        if s.args["nesterov"]:
            xp.multiply(mean, momentum, out=work)
            xp.add(grad, work, out=grad)
        else:
            grad = mean
    xp.multiply(grad, scalar(s.rate), out=work)
    xp.subtract(s.params, work, out=s.out_params)


def _adam(s: _Step, *, decoupled: bool) -> None:
    grad, params, (work,) = s.grad, s.params, s.scratch
    xp, scalar = xp_of(grad), grad.dtype.type
    (beta1, beta2), decay = s.args["betas"], s.args["weight_decay"]
    mean, square = s.out_slots["exp_avg"], s.out_slots["exp_avg_sq"]
    if not decoupled:
        _decay_into(s, work)
    xp.multiply(grad, scalar(1 - beta1), out=work)
    xp.multiply(s.slots["exp_avg"], scalar(beta1), out=mean)
    xp.add(mean, work, out=mean)
    _mean_square_into(square, s.slots["exp_avg_sq"], grad, beta2, work)
    # Both bias corrections in the scalars: p -= lr' m / (sqrt(v) + eps')
    root = math.sqrt(1 - beta2**s.t)
    xp.sqrt(square, out=work)
    xp.add(work, scalar(s.args["eps"] * root), out=work)
    xp.divide(mean, work, out=work)
    xp.multiply(work, scalar(s.rate * root / (1 - beta1**s.t)), out=work)
    if decoupled and decay:
        xp.multiply(params, scalar(1 - s.rate * decay), out=s.out_params)
        params = s.out_params
    xp.subtract(params, work, out=s.out_params)


def _adagrad(s: _Step) -> None:
    grad, total, (work,) = s.grad, s.out_slots["sum"], s.scratch
    xp, scalar = xp_of(grad), grad.dtype.type
    _decay_into(s, work)
    xp.multiply(grad, grad, out=work)
    xp.add(s.slots["sum"], work, out=total)
    xp.sqrt(total, out=work)
    xp.add(work, scalar(s.args["eps"]), out=work)
    xp.divide(grad, work, out=work)
    xp.multiply(work, scalar(s.rate / (1 + (s.t - 1) * s.args["lr_decay"])), out=work)
    xp.subtract(s.params, work, out=s.out_params)


def _rmsprop(s: _Step) -> None:
    grad, square, (work, least) = s.grad, s.out_slots["square_avg"], s.scratch
    xp, scalar, alpha = xp_of(grad), grad.dtype.type, s.args["alpha"]
    _decay_into(s, work)
    _mean_square_into(square, s.slots["square_avg"], grad, alpha, work)
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
        xp.multiply(moving, scalar(s.rate), out=work)
    else:
        xp.multiply(work, scalar(s.rate), out=work)
    xp.subtract(s.params, work, out=s.out_params)


def _decay_into(s: _Step, work: Array) -> None:
    """Add the L2 penalty to the gradient."""
    if s.args["weight_decay"]:
        xp = xp_of(s.grad)
        xp.multiply(s.params, s.grad.dtype.type(s.args["weight_decay"]), out=work)
        xp.add(s.grad, work, out=s.grad)


def _mean_square_into(out: Array, before: Array, grad: Array, decay: float, work: Array) -> None:
    """``out = decay before + (1 - decay) grad^2``."""
    xp, scalar = xp_of(grad), grad.dtype.type
    xp.multiply(grad, scalar(1 - decay), out=work)
    xp.multiply(work, grad, out=work)
    xp.multiply(before, scalar(decay), out=out)
    xp.add(out, work, out=out)


@dataclass(frozen=True)
class _Kind:
    constructor: Callable[..., Optimizer]  # its signature holds the arguments and their defaults
    update: Callable[[_Step], None]
    slots: Callable[[Mapping[str, Any]], Mapping[str, float]]  # name -> its first value
    scratch: int


def _adam_slots(args: Mapping[str, Any]) -> dict[str, float]:
    return {"exp_avg": 0.0, "exp_avg_sq": 0.0}


def _rmsprop_slots(args: Mapping[str, Any]) -> dict[str, float]:
    kept = {"square_avg": True, "grad_avg": args["centered"], "momentum_buffer": args["momentum"]}
    return {name: 0.0 for name, is_kept in kept.items() if is_kept}


_KINDS: dict[str, _Kind] = {
    "sgd": _Kind(sgd, _sgd, lambda args: {"momentum_buffer": 0.0} if args["momentum"] else {}, 1),
    "adam": _Kind(adam, partial(_adam, decoupled=False), _adam_slots, 1),
    "adamw": _Kind(adamw, partial(_adam, decoupled=True), _adam_slots, 1),
    "adagrad": _Kind(adagrad, _adagrad, lambda args: {"sum": args["initial_accumulator_value"]}, 1),
    "rmsprop": _Kind(rmsprop, _rmsprop, _rmsprop_slots, 2),
}


def _plain(value: Value) -> Any:
    if isinstance(value, Schedule):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


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


#: What an argument may be that is neither True or False nor just a number from 0 up; one name
#: means the same in every optimizer.
_RULES: dict[str, Callable[[str, Any], Value]] = {
    "lr": _lr,
    "betas": _betas,
    "alpha": partial(number, below=1.0),
    "eps": partial(number, least=1e-30),
}


def _rule(name: str, default: Any) -> Callable[[str, Any], Value]:
    return _RULES.get(name, flag if isinstance(default, bool) else number)


def _checked(kind: str, args: Mapping[str, Any]) -> dict[str, Value]:
    defaults = inspect.signature(_KINDS[kind].constructor).parameters
    arguments(kind, args, defaults)
    values = {
        name: _rule(name, parameter.default)(f"{kind}.{name}", args.get(name, parameter.default))
        for name, parameter in defaults.items()
    }
    if values.get("nesterov") and not values.get("momentum"):
        raise SpecError(f"{kind}.nesterov: found True with momentum 0, expected a momentum above 0")
    return values
