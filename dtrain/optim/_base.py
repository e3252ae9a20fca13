"""Optimizers as values, and what the runtime asks of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from dtrain.arrays import Array, aligned_bytes, quiet, xp_of
from dtrain.checks import choice
from dtrain.errors import SpecError
from dtrain.optim._blocks import CHUNK
from dtrain.optim._described import Described
from dtrain.optim._transforms import Transform, transform_all
from dtrain.schedules import Schedule

Slots: TypeAlias = Mapping[str, Array]

#: The slice of an optimizer that asks for no sums is one block, for all that it knows.
_ONE_BLOCK = np.zeros(1, np.intp)


class Step(NamedTuple):
    """What one pass over a slice is told: see :meth:`Optimizer.stage`."""

    args: Mapping[str, Any]
    t: int
    grad: Array
    params: Array
    slots: Slots
    out_params: Array
    out_slots: Slots
    scratch: Sequence[Array]
    starts: np.ndarray
    factors: np.ndarray | None

    def rate(self, t: int | None = None) -> float:
        """The learning rate of step ``t``; of this one if not given."""
        lr = self.args["lr"]
        return lr((self.t if t is None else t) - 1) if isinstance(lr, Schedule) else lr


class Kind(Protocol):
    """How all optimizers of one kind work; ``args`` are those of the optimizer."""

    def checked(self, key: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments in their plain form; errors name them ``key.argument``."""

    def initial(self, args: Mapping[str, Any]) -> Mapping[str, float]: ...

    def scratch(self, args: Mapping[str, Any]) -> int: ...

    def stages(self, args: Mapping[str, Any]) -> int: ...

    def sums(self, args: Mapping[str, Any]) -> int: ...

    def stage(self, index: int, step: Step) -> np.ndarray | None: ...

    def resolve(
        self, index: int, args: Mapping[str, Any], sums: np.ndarray, variables: np.ndarray
    ) -> np.ndarray: ...


#: Every kind of optimizer, by name; the modules of this package fill it.
KINDS: dict[str, Kind] = {}


class Optimizer(Described):
    """An update rule and its hyper-parameters; it holds no state.

    Make one with the functions of :mod:`dtrain.optim`.

    Parameters
    ----------
    kind : str
        The name of its constructor.
    args : mapping
        That constructor's arguments; what is left out has its default.  ``lr`` may be a schedule,
        or the mapping that describes one.  A chain has ``transforms`` and ``optimizer``.

    Raises
    ------
    SpecError
        Names the argument, what was found and what is allowed.
    """

    def _checked(self) -> dict[str, Any]:
        return KINDS[choice("optimizer", self.kind, KINDS)].checked(self.kind, self.args)

    # All of these follow from the kind and its arguments; a step of a small model asks for them
    # more often than it computes.

    @cached_property
    def _works(self) -> Kind:
        return KINDS[self.kind]

    @cached_property
    def inner(self) -> Optimizer:
        """The optimizer of a chain, without the transforms; of others the optimizer itself."""
        return self.args.get("optimizer", self)

    @cached_property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms of a chain, the first first; others have none."""
        return self.args.get("transforms", ())

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """Names of its state arrays, each as large as the parameters."""
        return tuple(self.initial)

    @cached_property
    def initial(self) -> Mapping[str, float]:
        """What all elements of each of :attr:`slots` are before the first step; 0 in most."""
        return self._works.initial(self.args)

    @cached_property
    def scratch(self) -> int:
        """How many scratch arrays a step needs, each at least as long as the slice."""
        return self._works.scratch(self.args)

    @cached_property
    def stages(self) -> int:
        """Passes over the parameters that a step takes, from 1 up.

        Between two of them the sums that :meth:`stage` returned for all blocks of the model go to
        :meth:`resolve`.
        """
        return self._works.stages(self.args)

    @cached_property
    def sums(self) -> int:
        """Sums per block that each stage but the last returns; 0 with one stage."""
        return self._works.sums(self.args)

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
        """Write the parameters and slots of step ``t``, for one slice, in one pass.

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
            If ``t`` is below 1, or a step takes more than one of :attr:`stages`.
        """
        if self.stages != 1:
            raise ValueError(
                f"{self!r}: found an update in one pass, expected {self.stages} stages with sums "
                "between them"
            )
        self.stage(0, t, grad, params, slots, out_params, out_slots, scratch, _ONE_BLOCK, None)

    def stage(
        self,
        index: int,
        t: int,
        grad: Array,
        params: Array,
        slots: Slots,
        out_params: Array,
        out_slots: Slots,
        scratch: Sequence[Array],
        starts: np.ndarray,
        factors: np.ndarray | None,
    ) -> np.ndarray | None:
        """One of the :attr:`stages` of step ``t``, for a slice that consists of whole blocks.

        No array as long as the slice is allocated, unless norms leave the range of the dtype's
        squares or factors change every few elements.  The result does not depend on how blocks
        are grouped into slices.

        Parameters
        ----------
        index : int
            The number of the stage; the first is 0.
        t : int
            The number of this step; the first is 1.
        grad : ndarray, shape (n,)
            float32 or float64, as all arrays here.  At stage 0 the mean gradient, all finite;
            later what the stage before has left there.  It may be overwritten.
        params, slots : ndarray and mapping of str to ndarray, shape (n,)
            The state before the step.  Where they are the arrays of the outputs, an earlier stage
            may have written the slots already.
        out_params, out_slots : ndarray and mapping of str to ndarray, shape (n,)
            Where the state after it goes: other arrays, or the very same ones.  The last stage
            writes the parameters, any of them the slots.
        scratch : sequence of ndarray, shape (>= n,)
            :attr:`scratch` arrays or more (see :func:`make_scratch`).
        starts : ndarray of int, shape (blocks,)
            Where each block begins in the slice; the first is 0.
        factors : ndarray of float64, shape (blocks,)
            What :meth:`resolve` made of the sums of the stage before, for these blocks; None at
            stage 0.

        Returns
        -------
        ndarray of float64, shape (sums, blocks), or None
            What :meth:`resolve` is to be told of these blocks; None at the last stage.

        Raises
        ------
        ValueError
            If ``t`` is below 1, or there is no such stage.
        """
        if t < 1:
            raise ValueError(f"t: found {t}, expected the number of a step, from 1 up")
        if not 0 <= index < self.stages:
            raise ValueError(f"index: found {index}, expected a stage below {self.stages}")
        scratch = [array[: grad.size] for array in scratch[: self.scratch]]
        step = Step(
            self.args, t, grad, params, slots, out_params, out_slots, scratch, starts, factors
        )
        with quiet():
            return self._works.stage(index, step)

    def resolve(self, index: int, sums: np.ndarray, variables: np.ndarray) -> np.ndarray:
        """The factors of stage ``index + 1``, from the sums of stage ``index``.

        They are added in a fixed order: the same bits wherever it is computed.

        Parameters
        ----------
        index : int
            The number of the stage that returned the sums.
        sums : ndarray of float64, shape (sums, blocks)
            What :meth:`stage` returned for all blocks of the model, in the order of the layout.
        variables : ndarray of int, shape (blocks,)
            Which variable each block belongs to.

        Returns
        -------
        ndarray of float64, shape (blocks,)

        Raises
        ------
        ValueError
            If there is no stage after this one.
        """
        if not 0 <= index < self.stages - 1:
            raise ValueError(f"index: found {index}, expected one below {self.stages - 1}")
        with quiet():
            return self._works.resolve(index, self.args, sums, variables)

    def transform(self, flat: Sequence[Array], starts: Sequence[np.ndarray]) -> None:
        """Apply all :attr:`transforms` to one whole gradient, in place.

        What is left is for :attr:`inner`.  Norms are the same sums, in the same order, as in the
        stages of the chain.

        Parameters
        ----------
        flat : sequence of ndarray
            The gradient: a flat array for each segment of the layout.
        starts : sequence of ndarray of int
            Where each block begins in its segment, for each segment.
        """
        transform_all(self.transforms, flat, starts)

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

    def __repr__(self) -> str:
        if self.kind == "chain":
            return f"chain({', '.join(map(repr, (*self.transforms, self.inner)))})"
        return super().__repr__()


def optimizer_from(key: str, value: Any) -> Optimizer:
    """An optimizer, or the one that a mapping describes; errors name it ``key``."""
    if isinstance(value, Optimizer):
        return value
    if not isinstance(value, Mapping):
        raise SpecError(
            f"{key}: found {value!r}, expected an optimizer of dtrain.optim, like adam()"
        )
    rest = dict(value)
    kind = choice(f"{key}.kind", rest.pop("kind", None), KINDS)
    return Optimizer(kind, KINDS[kind].checked(key, rest))


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
    """The scratch arrays of an optimizer, for slices of up to ``chunk`` elements."""
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
