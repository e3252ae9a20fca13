"""The byte layout of a model: named arrays <-> one flat buffer.

The buffer has one segment for each dtype, and in it the variables of that dtype in the order of
the model.  Variables and segments start on multiples of 64 bytes; the padding between them is
always zero, so that arithmetic may run over it.  The buffer is tiled by *blocks*, groups of whole
rows of one variable.  Their bounds depend on the model alone, never on the number of shards: sums
over blocks, in order, are the same bits however the buffer is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dtrain.arrays import ALIGNMENT, Array, copy_into, to_numpy
from dtrain.errors import SpecError

#: How many elements a block holds at most: 128 kB of float32, at home in an L2 cache.
BLOCK_ELEMENTS = 32768

#: About how many blocks a small model has: few enough to handle, and enough to share them evenly.
BLOCKS = 128

_DTYPES: dict[Any, str] = {np.dtype(name): name for name in ("float32", "float64")}


@dataclass(frozen=True)
class Variable:
    """One named array in the buffer; ``offset`` in bytes, a multiple of 64."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, without padding."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Segment:
    """The bytes ``start`` to ``stop`` that hold all variables of one dtype, padding included."""

    dtype: str
    start: int
    stop: int


@dataclass(frozen=True)
class Block:
    """The bytes ``start`` to ``stop``: whole rows of ``variable``, and its padding in the last."""

    start: int
    stop: int
    variable: str
    dtype: str


class Views(dict[str, Array]):
    """Named, shaped views of one buffer.

    Attributes
    ----------
    flat : ndarray of uint8, shape (layout.nbytes,)
        All of it, padding included.
    """

    def __init__(self, named: Mapping[str, Array], flat: Array) -> None:
        super().__init__(named)
        self.flat = flat


@dataclass(frozen=True)
class Layout:
    """Where each variable of a model lies in one flat buffer.

    Make one with :meth:`of` or :meth:`from_dict`.

    Attributes
    ----------
    variables : tuple of Variable
        In the order of the model.
    segments : tuple of Segment
        One for each dtype, in the order of its first appearance; they tile the buffer.
    nbytes : int
        The size of the buffer, a multiple of 64.
    """

    variables: tuple[Variable, ...]
    segments: tuple[Segment, ...]
    nbytes: int

    @classmethod
    def of(cls, params: Mapping[str, Array]) -> Layout:
        """The layout of a model's parameters.

        Parameters
        ----------
        params : mapping of str to ndarray
            float32 or float64, of any shape without a zero in it.

        Raises
        ------
        SpecError
            No variables, or one with a bad name, no elements, or another dtype.
        """
        if not isinstance(params, Mapping) or not params:
            raise SpecError(f"params: found {_brief(params)}, expected a dict of arrays, not empty")
        fields = []
        for name, array in params.items():
            if not isinstance(name, str) or not name:
                raise SpecError(f"params: found the name {name!r}, expected a string, not empty")
            dtype = _DTYPES.get(getattr(array, "dtype", None))
            if dtype is None:
                raise SpecError(
                    f"params[{name!r}]: found {_brief(array)}, "
                    "expected an array of float32 or float64"
                )
            if 0 in array.shape:
                raise SpecError(f"params[{name!r}]: found shape {array.shape}, expected elements")
            fields.append((name, tuple(map(int, array.shape)), dtype))
        return cls._build(fields)

    @classmethod
    def _build(cls, fields: Iterable[tuple[str, tuple[int, ...], str]]) -> Layout:
        fields = list(fields)
        placed: dict[str, Variable] = {}
        segments = []
        end = 0
        for dtype in dict.fromkeys(dtype for _, _, dtype in fields):
            start = end
            for name, shape, own in fields:
                if own == dtype:
                    placed[name] = Variable(name, shape, dtype, end)
                    end = _padded(end + placed[name].nbytes)
            segments.append(Segment(dtype, start, end))
        return cls(tuple(placed[name] for name, _, _ in fields), tuple(segments), end)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The groups of whole rows that tile the buffer, in the order of the buffer."""
        blocks = []
        for variable in sorted(self.variables, key=lambda v: v.offset):
            step = _block_bytes(variable, self.nbytes)
            starts = range(variable.offset, variable.offset + variable.nbytes, step)
            stops = [*starts[1:], _padded(starts.stop)]
            blocks += [
                Block(start, stop, variable.name, variable.dtype)
                for start, stop in zip(starts, stops, strict=True)
            ]
        return tuple(blocks)

    @cached_property
    def block_variables(self) -> np.ndarray:
        """Which variable each block belongs to, by its place in the model; int64, (blocks,)."""
        number = {v.name: i for i, v in enumerate(self.variables)}
        return np.array([number[block.variable] for block in self.blocks])

    @cached_property
    def block_starts(self) -> tuple[np.ndarray, ...]:
        """For each segment, at which of its elements each of its blocks begins; int64."""
        return tuple(
            np.array([b.start - s.start for b in self.blocks if s.start <= b.start < s.stop])
            // np.dtype(s.dtype).itemsize
            for s in self.segments
        )

    @cached_property
    def uncut(self) -> Layout:
        """The same, with one block for each variable: no shard then has a part of one."""
        return _Uncut(self.variables, self.segments, self.nbytes)

    def views(self, buffer: Array) -> Views:
        """Named, shaped views of a buffer, in the order of the model.

        Parameters
        ----------
        buffer : ndarray of uint8, shape (>= nbytes,)
            Of NumPy or CuPy.  Where it starts on a multiple of 64 bytes, so does every view.

        Raises
        ------
        ValueError
            If the buffer is too small, or not a flat array of bytes.
        """
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or buffer.size < self.nbytes:
            raise ValueError(
                f"buffer: found {_brief(buffer)}, expected uint8 of shape ({self.nbytes},) or more"
            )
        named = {
            v.name: buffer[v.offset : v.offset + v.nbytes].view(v.dtype).reshape(v.shape)
            for v in self.variables
        }
        return Views(named, buffer[: self.nbytes])

    def write(self, buffer: Array, params: Mapping[str, Array]) -> None:
        """Copy ``params`` into ``buffer``, from either device to either; padding is left alone.

        Raises
        ------
        ValueError
            As :meth:`check` and :meth:`views` do; nothing is written then.
        """
        self.check(params)
        for name, view in self.views(buffer).items():
            copy_into(view, params[name])

    def read(self, buffer: Array) -> dict[str, np.ndarray]:
        """Copies of all variables in host memory."""
        return {name: np.array(to_numpy(view)) for name, view in self.views(buffer).items()}

    def check(self, arrays: Mapping[str, Array]) -> None:
        """Refuse arrays, a user's gradients for instance, that do not fit this layout.

        Raises
        ------
        ValueError
            Names the first array that is missing, unknown, or of a wrong shape or dtype, and
            says what was found and what was expected.
        """
        if not isinstance(arrays, Mapping):
            raise ValueError(f"found {_brief(arrays)}, expected a dict of arrays")
        names = [v.name for v in self.variables]
        for variable in self.variables:
            if variable.name not in arrays:
                raise ValueError(
                    f"{variable.name!r} is missing: found {sorted(map(str, arrays))}, "
                    f"expected {sorted(names)}"
                )
            array = arrays[variable.name]
            shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
            if shape != variable.shape or _DTYPES.get(dtype) != variable.dtype:
                raise ValueError(
                    f"{variable.name!r}: found {_brief(array)}, "
                    f"expected {variable.dtype} of shape {variable.shape}"
                )
        if len(arrays) > len(names):
            extra = next(name for name in arrays if name not in names)
            raise ValueError(f"{extra!r} is unknown: expected only {sorted(names)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which :meth:`from_dict` makes an equal layout."""
        return {
            "variables": [
                {"name": v.name, "shape": list(v.shape), "dtype": v.dtype} for v in self.variables
            ]
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Layout:
        """The layout that :meth:`to_dict` described; offsets follow from shapes and dtypes."""
        return cls._build((v["name"], tuple(v["shape"]), v["dtype"]) for v in values["variables"])


class _Uncut(Layout):
    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        placed = sorted(self.variables, key=lambda v: v.offset)
        return tuple(Block(v.offset, _padded(v.offset + v.nbytes), v.name, v.dtype) for v in placed)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _block_bytes(variable: Variable, model: int) -> int:
    """The size of a full block of a variable, in a model of so many bytes.

    As many whole rows as fit into 1 / BLOCKS of the model, and into BLOCK_ELEMENTS; one at least.
    Blocks begin on multiples of 64 bytes where so many rows fit.
    """
    itemsize = np.dtype(variable.dtype).itemsize
    # The elements of a 0-d or 1-d variable are its rows.
    row = math.prod(variable.shape[1:]) * itemsize
    fair = min(max(model // BLOCKS, ALIGNMENT), BLOCK_ELEMENTS * itemsize)
    rows = max(1, fair // row)
    aligned = ALIGNMENT // math.gcd(ALIGNMENT, row)
    if aligned <= rows:
        rows -= rows % aligned
    return rows * row


def _brief(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:80]
