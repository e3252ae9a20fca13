"""The array maths of one shard: sums gradients, checks them, applies the optimizer.

An optimizer takes one pass over a shard, or several *stages*: between two of them the shards
exchange sums over their blocks (squares, for a global norm), so that each goes on with the same
factors.  Slices of work are then whole blocks, and sums over blocks have a fixed order: the same
bits, however the model is cut into shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dtrain.arrays import aligned_bytes, xp_of
from dtrain.layout import Layout
from dtrain.optim import Optimizer
from dtrain.partition import Range, Shard
from dtrain.tree import reduce_into, scratch_needed

#: Elements per piece of work: several passes over 128 KiB of float32 stay in the L2 cache.
CHUNK = 1 << 15

#: One flat array per range of a shard.
Flat = Sequence[Any]

#: The same, each cut into pieces of work.
Pieces = Sequence[Sequence[Any]]


def cut(buffer: Any, ranges: Sequence[Range]) -> list[Any]:
    """The typed flat views of a whole-model buffer that belong to a shard."""
    return [buffer[r.start : r.stop].view(r.dtype) for r in ranges]


def finite(array: Any) -> bool:
    """Whether all elements are finite; one pass, no temporary array in the usual case."""
    if math.isfinite(float(array.dot(array))):
        return True
    # The sum of squares overflows before the elements do.
    return bool(xp_of(array).isfinite(array).all())


class _Slice(NamedTuple):
    """A piece of work: elements ``a`` to ``b`` of a range, which are whole blocks if that matters.

    ``first`` is the number, within the shard, of its first block; ``starts`` says where each
    begins in the slice.
    """

    a: int
    b: int
    first: int = 0
    starts: Any = None


class Updater:
    """The array maths of one shard; it keeps no state but scratch, versions are its caller's.

    Parameters
    ----------
    shard : Shard
    layout : Layout
    optimizer : Optimizer
    replicas : int
    params : sequence of list of ndarray
        One flat array per range, for each of the buffers.
    slots : sequence of list of dict of str to ndarray
        The optimizer's slots, likewise.
    work : list of ndarray, optional
        One flat array per range: what a stage leaves for the next; needed if there are several.
    """

    def __init__(
        self,
        shard: Shard,
        layout: Layout,
        optimizer: Optimizer,
        replicas: int,
        params: Sequence[Flat],
        slots: Sequence[Sequence[Mapping[str, Any]]],
        work: Flat | None = None,
    ) -> None:
        self.ranges = shard.ranges
        self.optimizer = optimizer
        self.replicas = replicas
        self.params = params
        self.slots = slots
        self.work = work
        self._scratch: dict[str, list[Any]] = {}
        self._cuts: dict[tuple[int, int], list[tuple[Any, Any, Any, Any]]] = {}
        #: the numbers of its blocks among those of the model, if the optimizer has several stages
        self.blocks = np.array([], int)
        if optimizer.stages == 1:
            self._slices = [_even(array.size) for array in params[0]]
        else:
            self.blocks, self._slices = _of_blocks(layout, shard.ranges)
            self._variables = layout.block_variables[self.blocks]

    def pieces(self, flat: Flat) -> Pieces:
        """A gradient, cut as :meth:`reduce` takes it; views."""
        return [
            [array[s.a : s.b] for s in slices]
            for array, slices in zip(flat, self._slices, strict=True)
        ]

    # -- synchronous ---------------------------------------------------------------------------

    def reduce(
        self,
        step: int,
        members: tuple[int, ...],
        weights: tuple[float, ...],
        leaves: Mapping[int, Pieces],
        sums: Any = None,
    ) -> int | None:
        """The first stage: from the buffer of ``step``, with the mean gradient of ``members``.

        If it is the only one, the other buffer then has the next version.  Else ``sums``, float64
        of shape (optimizer.sums, len(self.blocks)), has what :meth:`go_on` is to be told of.

        Returns None, or whose gradient is not finite; -1 if only their sum is not.
        """
        extra = scratch_needed(members, weights, self.replicas)
        for k, r in enumerate(self.ranges):
            buffers = self._buffers(r.dtype, extra)
            views = self._views(step % 2, k)
            for c, (piece, (params, slots, out, out_slots)) in enumerate(
                zip(self._slices[k], views, strict=True)
            ):
                n = params.size
                grad, *work = [x if x.size == n else x[:n] for x in buffers]
                if self.work is not None:
                    grad = self.work[k][piece.a : piece.b]
                pieces = {i: leaves[i][k][c] for i in members}
                reduce_into(members, weights, self.replicas, pieces, grad, work, xp_of(params))
                if not finite(grad):
                    wrong = (i for i in members if not all(map(finite, leaves[i][k])))
                    return next(wrong, -1)
                if sums is None:
                    self.optimizer.update(step + 1, grad, params, slots, out, out_slots, work)
                else:
                    found = self.optimizer.stage(
                        0, step + 1, grad, params, slots, out, out_slots, work, piece.starts, None
                    )
                    sums[:, piece.first : piece.first + len(piece.starts)] = found
        return None

    def go_on(self, index: int, step: int, factors: Any, sums: Any = None) -> None:
        """Another stage: ``factors`` of all blocks of the model, made of the sums of the last.

        ``sums`` as in :meth:`reduce`; None at the last stage, which completes the version.
        """
        self._stage(self.optimizer, index, step + 1, step % 2, factors[self.blocks], sums)

    def _stage(
        self, optimizer: Optimizer, index: int, t: int, old: int, factors: Any, sums: Any
    ) -> None:
        assert self.work is not None
        for k, r in enumerate(self.ranges):
            buffers = self._buffers(r.dtype, 0)
            for piece, views in zip(self._slices[k], self._views(old, k), strict=True):
                params, slots, out, out_slots = views
                count = len(piece.starts)
                own = None if factors is None else factors[piece.first : piece.first + count]
                found = optimizer.stage(
                    index, t, self.work[k][piece.a : piece.b], params, slots, out, out_slots,
                    [x[: params.size] for x in buffers], piece.starts, own,
                )  # fmt: skip
                if sums is not None:
                    sums[:, piece.first : piece.first + count] = found

    def no_sums(self) -> np.ndarray:
        """Where a stage leaves its sums: zeros, float64 of shape (sums, blocks)."""
        return np.zeros((self.optimizer.sums, len(self.blocks)))

    def keep(self, step: int) -> None:
        """The next version is the same as that of ``step``: nothing is applied."""
        old, new = step % 2, (step + 1) % 2
        for k in range(len(self.ranges)):
            np.copyto(self.params[new][k], self.params[old][k])
            for name, slot in self.slots[old][k].items():
                np.copyto(self.slots[new][k][name], slot)

    def _views(self, old: int, k: int) -> list[tuple[Any, Any, Any, Any]]:
        """What each slice of a range reads and writes, by the buffer that it reads; made once."""
        if (old, k) not in self._cuts:
            new = (old + 1) % len(self.params)

            def cut_at(s: _Slice) -> tuple[Any, Any, Any, Any]:
                slots, out_slots = self.slots[old][k], self.slots[new][k]
                return (
                    self.params[old][k][s.a : s.b],
                    {name: slot[s.a : s.b] for name, slot in slots.items()},
                    self.params[new][k][s.a : s.b],
                    {name: slot[s.a : s.b] for name, slot in out_slots.items()},
                )

            self._cuts[old, k] = [cut_at(s) for s in self._slices[k]]
        return self._cuts[old, k]

    # -- asynchronous --------------------------------------------------------------------------

    def apply(self, step: int, grads: Flat) -> None:
        """Apply one gradient in place, as update number ``step`` (from 1).

        Its replica has seen to the transforms of a chain; the variables of a shard are whole if
        the optimizer has several stages.
        """
        optimizer = self.optimizer.inner
        if optimizer.stages > 1:
            self._apply_in_stages(optimizer, step, grads)
            return
        for k, r in enumerate(self.ranges):
            buffers = self._buffers(r.dtype, 0)
            for s, views in zip(self._slices[k], self._views(0, k), strict=True):
                # The optimizer may write to its gradient; the replica's is not its to write to.
                grad, *work = (x[: s.b - s.a] for x in buffers)
                grad[...] = grads[k][s.a : s.b]
                optimizer.update(step, grad, *views, work)

    def _apply_in_stages(self, optimizer: Optimizer, step: int, grads: Flat) -> None:
        if self.work is None:
            self.work = make_work(self.ranges)
        for target, source in zip(self.work, grads, strict=True):
            target[...] = source
        factors = None
        for index in range(optimizer.stages):
            last = index + 1 == optimizer.stages
            sums = None if last else self.no_sums()
            self._stage(optimizer, index, step, 0, factors, sums)
            if sums is not None:
                factors = optimizer.resolve(index, sums, self._variables)

    # -- both ----------------------------------------------------------------------------------

    def _buffers(self, dtype: str, extra: int) -> list[Any]:
        count = 1 + max(extra, self.optimizer.scratch)
        known = self._scratch.get(dtype, [])
        if len(known) < count:
            size = max(s.b - s.a for slices in self._slices for s in slices)
            known = self._scratch[dtype] = [np.empty(size, dtype) for _ in range(count)]
        return known


def _even(size: int) -> list[_Slice]:
    return [_Slice(a, min(a + CHUNK, size)) for a in range(0, size, CHUNK)]


def _of_blocks(layout: Layout, ranges: Sequence[Range]) -> tuple[Any, list[list[_Slice]]]:
    """The numbers of a shard's blocks, and its ranges in slices of whole blocks."""
    blocks = layout.blocks
    numbers: list[int] = []
    found = []
    for r in ranges:
        size = np.dtype(r.dtype).itemsize
        inside = [i for i, b in enumerate(blocks) if r.start <= b.start and b.stop <= r.stop]
        slices = []
        group: list[int] = []
        for i in inside:
            if group and (blocks[i].stop - blocks[group[0]].start) // size > CHUNK:
                slices.append(_grouped(blocks, group, r, size, len(numbers) - len(group)))
                group = []
            group.append(i)
            numbers.append(i)
        slices.append(_grouped(blocks, group, r, size, len(numbers) - len(group)))
        found.append(slices)
    return np.array(numbers), found


def _grouped(blocks: Any, group: list[int], r: Range, size: int, first: int) -> _Slice:
    a, b = blocks[group[0]].start, blocks[group[-1]].stop
    starts = np.array([(blocks[i].start - a) // size for i in group])
    return _Slice((a - r.start) // size, (b - r.start) // size, first, starts)


def make_work(ranges: Sequence[Range]) -> list[Any]:
    """What the stages of a shard hand on, in memory of this process."""
    return [aligned_bytes(r.stop - r.start).view(r.dtype) for r in ranges]
