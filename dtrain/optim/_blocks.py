"""Norms and factors of blocks: all that optimizers do that is not elementwise.

A block's norm depends on its own elements alone, not on what else is in the slice, nor on the
processor: NumPy's pairwise sum adds in the same order on all of them, which a BLAS does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from dtrain.arrays import Array, to_numpy, xp_of

#: Elements that are worked on at a time: the several passes then stay in the L2 cache.
CHUNK = 32768

#: A call of NumPy costs about as much as the arithmetic on so many elements.
_CALL = 1024


def norms(array: Array, starts: np.ndarray, work: Array) -> np.ndarray:
    """The Euclidean norm of each block of a slice.

    Parameters
    ----------
    array, work : ndarray, shape (n,)
        float32 or float64; ``work`` is overwritten.
    starts : ndarray of int, shape (blocks,)
        Where each block begins.

    Returns
    -------
    ndarray of float64, shape (blocks,)
        Finite where all elements are and their norm is; also where their squares are not.
    """
    xp, info = xp_of(array), np.finfo(array.dtype)
    xp.multiply(array, array, out=work)
    if xp is np:
        squares = np.add.reduceat(work, starts).astype(np.float64)
    else:  # a reduction each: CuPy adds up no segments
        parts = [work[a:b].sum(dtype=np.float64) for a, b in _bounds(starts, array.size)]
        squares = to_numpy(xp.stack(parts))
    found = np.sqrt(squares)
    # Squares overflow, or fall among the subnormal numbers, long before the elements do.
    least = info.tiny / info.eps
    bad = np.flatnonzero(~((squares > least) & (squares < math.inf)))
    if bad.size:
        bounds = _bounds(starts, array.size)
        for k in bad.tolist():
            part = slice(*bounds[k])
            found[k] = _scaled_norm(array[part], work[part])
    return found


def norm(of_blocks: np.ndarray) -> float:
    """The norm of blocks together, from :func:`norms` of theirs in the order of the model."""
    return float(norms(of_blocks, np.zeros(1, np.intp), np.empty_like(of_blocks))[0])


def norms_of_variables(of_blocks: np.ndarray, variables: np.ndarray) -> np.ndarray:
    """For each block the norm of the whole variable that it belongs to (int, shape (blocks,))."""
    order = np.argsort(variables, kind="stable")
    first = np.append(True, np.diff(variables[order]) != 0)
    found = norms(of_blocks[order], np.flatnonzero(first), np.empty_like(of_blocks))
    every = np.empty_like(of_blocks)
    every[order] = found[np.cumsum(first) - 1]
    return every


def norms_of_all(flat: Sequence[Array], starts: Sequence[np.ndarray]) -> np.ndarray:
    """:func:`norms` of all blocks of whole flat arrays, one after the other."""
    found = []
    for array, begins in zip(flat, starts, strict=True):
        slices = list(_slices(begins, array.size))
        work = xp_of(array).empty(max(b - a for a, b, _ in slices), array.dtype)
        found += [norms(array[a:b], own, work[: b - a]) for a, b, own in slices]
    return np.concatenate(found)


def scale(array: Array, starts: np.ndarray, factors: np.ndarray, out: Array) -> None:
    """Write to ``out`` each block of ``array`` times its factor (float64, shape (blocks,))."""
    xp, dtype = xp_of(array), array.dtype
    edges = np.flatnonzero(factors[1:] != factors[:-1]) + 1
    values = factors[np.append(0, edges)]
    bounds = [0, *starts[edges].tolist(), array.size]
    if len(values) * _CALL > array.size and len(values) > 1 and _fits(values, dtype).all():
        every = np.repeat(values.astype(dtype), np.diff(bounds))
        xp.multiply(array, xp.asarray(every), out=out)
        return
    for k, value in enumerate(values):
        part = slice(bounds[k], bounds[k + 1])
        if _fits(value, dtype):
            xp.multiply(array[part], dtype.type(value), out=out[part])
        else:
            xp.multiply(array[part], value, out=out[part], dtype=np.float64, casting="same_kind")


def _fits(factors: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Which factors the type of the array holds without loss of their leading digits."""
    info, size = np.finfo(dtype), np.abs(factors)
    return (size == 0) | ((size >= info.tiny) & (size <= info.max))


def _scaled_norm(array: Array, work: Array) -> float:
    xp = xp_of(array)
    xp.absolute(array, out=work)
    largest = float(work.max())
    if not 0 < largest < math.inf:
        return largest
    scaled = array.astype(np.float64) / largest
    return largest * math.sqrt(float((scaled * scaled).sum()))


def _bounds(starts: np.ndarray, size: int) -> list[tuple[int, int]]:
    ends = [*starts.tolist(), size]
    return list(pairwise(ends))


def _slices(starts: np.ndarray, size: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """(start, stop, starts of blocks in it) of slices of whole blocks, about a chunk long."""
    stops = np.append(starts[1:], size)
    first = 0
    while first < len(starts):
        last = int(np.searchsorted(stops, starts[first] + CHUNK, side="right"))
        last = max(first + 1, last)
        begin = int(starts[first])
        yield begin, int(stops[last - 1]), starts[first:last] - begin
        first = last
