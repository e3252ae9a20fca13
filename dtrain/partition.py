"""Cut the flat buffer of a layout into shards, and choose who hosts them."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, groupby, pairwise
from typing import Any, ClassVar

from dtrain.config import nbytes
from dtrain.errors import SpecError
from dtrain.layout import Block, Layout
from dtrain.optim import Optimizer
from dtrain.spec import PLACEMENTS, JobSpec, one_of, whole


@dataclass(frozen=True)
class Range:
    """The bytes ``start`` to ``stop`` of the flat buffer, all of one dtype."""

    start: int
    stop: int
    dtype: str


@dataclass(frozen=True)
class Shard:
    """A contiguous part of the flat buffer: one range for each dtype that it touches."""

    index: int
    ranges: tuple[Range, ...]

    @property
    def nbytes(self) -> int:
        return sum(r.stop - r.start for r in self.ranges)


@dataclass(frozen=True)
class ShardPlan:
    """All shards of a model, in the order of the buffer; together they tile it."""

    shards: tuple[Shard, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which :meth:`from_dict` makes an equal plan."""
        return {
            "shards": [[[r.start, r.stop, r.dtype] for r in shard.ranges] for shard in self.shards]
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ShardPlan:
        return cls(
            tuple(
                Shard(index, tuple(Range(start, stop, dtype) for start, stop, dtype in ranges))
                for index, ranges in enumerate(values["shards"])
            )
        )


def partition(layout: Layout, n: int) -> ShardPlan:
    """Cut the blocks of ``layout``, in order, into ``n`` shards; the largest is as small as can be.

    Parameters
    ----------
    layout : Layout
    n : int
        How many shards are wanted.  There are never more than blocks, and none is empty.

    Raises
    ------
    SpecError
        If ``n`` is not a whole number from 1 up.
    """
    sizes = _sizes(layout.blocks)
    return _plan(layout, _cuts(sizes, min(whole("shards", n), len(sizes))))


# -- partitioners ------------------------------------------------------------------------------


class Partitioner(ABC):
    """How many shards a model has: :class:`FixedShards`, :class:`MinSize` or :class:`MaxSize`."""

    kind: ClassVar[str]

    @abstractmethod
    def split(self, layout: Layout) -> ShardPlan:
        """The shards of a model."""

    @property
    def most(self) -> int | None:
        """How many shards there are at most; None: that takes the model to tell."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which :meth:`from_dict` makes an equal one."""
        return {"kind": self.kind, **vars(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Partitioner:
        """The partitioner of a ``kind``, with its other values as arguments.

        Raises
        ------
        SpecError
            Names what was found and what was expected.
        """
        arguments = dict(values)
        kinds = {cls.kind: cls for cls in (FixedShards, MinSize, MaxSize)}
        kind = one_of("partitioner.kind", arguments.pop("kind", None), tuple(kinds))
        wanted = [field.name for field in fields(kinds[kind])]
        if sorted(arguments) != sorted(wanted):
            raise SpecError(
                f"partitioner: found {sorted(arguments)} with kind {kind!r}, expected {wanted}"
            )
        return kinds[kind](**arguments)


@dataclass(frozen=True)
class FixedShards(Partitioner):
    """So many shards of about one size.

    Parameters
    ----------
    n : int
        A model of fewer blocks (groups of whole rows of a variable) has fewer shards.

    Raises
    ------
    SpecError
        If ``n`` is not a whole number from 1 up.
    """

    n: int
    kind: ClassVar[str] = "fixed_shards"

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", whole("partitioner.n", self.n))

    @property
    def most(self) -> int | None:
        return self.n

    def split(self, layout: Layout) -> ShardPlan:
        return partition(layout, self.n)


@dataclass(frozen=True)
class MinSize(Partitioner):
    """As many shards as ``max_shards``, but none smaller than ``bytes``.

    Parameters
    ----------
    bytes : int or str
        Of parameters, padding included; a number, or words such as ``"4MB"``.
    max_shards : int

    Raises
    ------
    SpecError
        If ``bytes`` is not a size of at least a byte, or ``max_shards`` not a whole number
        from 1 up.
    """

    bytes: int | str
    max_shards: int
    kind: ClassVar[str] = "min_size"

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", nbytes("partitioner.bytes", self.bytes))
        most = whole("partitioner.max_shards", self.max_shards)
        object.__setattr__(self, "max_shards", most)

    @property
    def most(self) -> int | None:
        return self.max_shards

    def split(self, layout: Layout) -> ShardPlan:
        """The shards of a model; one, if all of it is smaller than ``bytes``."""
        assert isinstance(self.bytes, int)
        count, filled = 0, 0
        for size in _sizes(layout.blocks):
            filled += size
            if filled >= self.bytes:
                count, filled = count + 1, 0
        # No more than these are large enough; of about one size, sometimes fewer are.
        for n in range(min(count, self.max_shards), 1, -1):
            plan = partition(layout, n)
            if min(shard.nbytes for shard in plan.shards) >= self.bytes:
                return plan
        return partition(layout, 1)


@dataclass(frozen=True)
class MaxSize(Partitioner):
    """As few shards as can be with none larger than ``bytes``.

    Parameters
    ----------
    bytes : int or str
        Of parameters, padding included; a number, or words such as ``"4MB"``.  A block (a group
        of whole rows of a variable) that is larger is a shard of its own.

    Raises
    ------
    SpecError
        If ``bytes`` is not a size of at least a byte.
    """

    bytes: int | str
    kind: ClassVar[str] = "max_size"

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", nbytes("partitioner.bytes", self.bytes))

    def split(self, layout: Layout) -> ShardPlan:
        assert isinstance(self.bytes, int)
        most, cuts = self.bytes, [0]
        for fits, run in groupby(_sizes(layout.blocks), lambda size: size <= most):
            sizes, start = list(run), cuts[-1]
            if fits:
                cuts += [start + cut for cut in _cuts(sizes, _needed(sizes, most))[1:]]
            else:
                cuts += range(start + 1, start + len(sizes) + 1)
        return _plan(layout, cuts)


def partitioner_of(spec: JobSpec) -> Partitioner:
    """The partitioner of a job whose replicas and shards are known."""
    if spec.partitioner is not None:
        return Partitioner.from_dict(spec.partitioner)
    return FixedShards(spec.shards or 1)


def split(spec: JobSpec, layout: Layout) -> ShardPlan:
    """The shards of a job's model.

    A variable that is larger than a fair share is cut by rows.  But an asynchronous update that
    needs the norms of whole variables (LAMB) is made of one shard alone: there none is cut.
    """
    optimizer = Optimizer.from_dict(spec.optimizer).inner
    whole_variables = spec.mode == "async" and optimizer.stages > 1
    return partitioner_of(spec).split(layout.uncut if whole_variables else layout)


def _sizes(blocks: Sequence[Block]) -> list[int]:
    return [block.stop - block.start for block in blocks]


def _needed(sizes: Sequence[int], most: int) -> int:
    """How many groups of at most ``most``, in order, hold all; each size is at most that."""
    count, room = 0, 0
    for size in sizes:
        if size > room:
            count, room = count + 1, most
        room -= size
    return count


def _plan(layout: Layout, cuts: Sequence[int]) -> ShardPlan:
    return ShardPlan(
        tuple(
            Shard(index, _merged(layout.blocks[a:b])) for index, (a, b) in enumerate(pairwise(cuts))
        )
    )


def rows_of(layout: Layout, shard: Shard) -> Iterator[tuple[str, int, int]]:
    """(variable, first row, row after the last) of all that a shard holds rows of.

    The elements of a vector are its rows; a number is one row.
    """
    for part in shard.ranges:
        for variable in layout.variables:
            end = variable.offset + variable.nbytes
            start, stop = max(part.start, variable.offset), min(part.stop, end)
            if start < stop:
                row = variable.nbytes // (variable.shape[0] if variable.shape else 1)
                first, last = start - variable.offset, stop - variable.offset
                yield variable.name, first // row, last // row


# -- placement ---------------------------------------------------------------------------------

#: A user's own: the sizes of the shards in bytes, and the addresses of the workers that may have
#: them; returns the index of a worker for each shard.
PlacementFunction = Callable[[list[int], list[str]], Sequence[int]]


def assign(
    sizes: Sequence[int], workers: Sequence[str], placement: str | PlacementFunction
) -> tuple[int, ...]:
    """Which worker hosts each shard.

    Parameters
    ----------
    sizes : sequence of int
        Of the shards, in bytes.
    workers : sequence of str
        Addresses.  The first is the chief, which has at least one shard.
    placement : str or callable
        ``"greedy"``: the largest first, each to the worker with the fewest bytes so far (Graham,
        1969: longest processing time first); ``"round-robin"``: one after the other; or a
        function ``(sizes, workers) -> indices``.

    Returns
    -------
    tuple of int
        For each shard an index into ``workers``.

    Raises
    ------
    SpecError
        A function's answer is not one index for each shard, or leaves the chief without any.
    """
    if callable(placement):
        return _checked(placement(list(sizes), list(workers)), len(sizes), workers)
    if one_of("placement", placement, PLACEMENTS) == "round-robin":
        return tuple(shard % len(workers) for shard in range(len(sizes)))
    where = [0] * len(sizes)
    loads = [(0, worker) for worker in range(len(workers))]
    for shard in sorted(range(len(sizes)), key=lambda shard: (-sizes[shard], shard)):
        load, worker = loads[0]
        where[shard] = worker
        heapq.heapreplace(loads, (load + sizes[shard], worker))
    # All workers are alike here: the chief is the one with shard 0, so that the lead stays there.
    names = {where[0]: 0, 0: where[0]}
    return tuple(names.get(worker, worker) for worker in where)


def check_placement(placement: Any) -> str:
    """The name of a placement, or a SpecError that says what else there is."""
    if placement not in PLACEMENTS:
        raise SpecError(
            f"placement: found {placement!r}, expected {' or '.join(map(repr, PLACEMENTS))}, or a "
            f"function of the shards' sizes and the workers' addresses"
        )
    return str(placement)


def _checked(found: Any, shards: int, workers: Sequence[str]) -> tuple[int, ...]:
    """A user's answer, as ints."""
    expected = (
        f"expected {shards} indices, one for each shard, from 0 to {len(workers) - 1} "
        f"({len(workers)} workers)"
    )
    try:
        if isinstance(found, Mapping | str):
            raise TypeError("not a sequence of numbers")
        where = [whole("placement", index, least=0) for index in found]
    except (TypeError, SpecError):
        raise SpecError(f"placement: its function returned {found!r:.200}, {expected}") from None
    if len(where) != shards or max(where) >= len(workers):
        raise SpecError(f"placement: its function returned {found!r:.200}, {expected}")
    if 0 not in where:
        raise SpecError(
            f"placement: its function returned {found!r:.200}, expected at least one shard at "
            f"worker 0, {workers[0]}, which has the lead"
        )
    return tuple(where)


def imbalance(loads: Sequence[int]) -> float:
    """By how much the largest is above the mean: 0.1 is 10 %; 0 where all are equal."""
    return max(loads) * len(loads) / sum(loads) - 1


def _cuts(sizes: Sequence[int], n: int) -> list[int]:
    """Bounds ``[0, ..., len(sizes)]`` of ``n`` groups, none empty, with the least largest sum."""
    ends = [0, *accumulate(sizes)]  # ends[i] = bytes before item i

    def reach(start: int, cap: int) -> int:
        return bisect_right(ends, ends[start] + cap) - 1

    def fits(cap: int) -> bool:
        at = 0
        for _ in range(n):
            at = reach(at, cap)
        return at == len(sizes)

    low = max(max(sizes), -(-ends[-1] // n))
    cap = low + bisect_left(range(low, ends[-1] + 1), True, key=fits)
    # needs[i]: how many groups of at most `cap` the items from i on need.
    needs = [0] * (len(sizes) + 1)
    for i in reversed(range(len(sizes))):
        needs[i] = 1 + needs[reach(i, cap)]
    # Any group may end early if the rest still fits: take about a fair share of what is left, so
    # that the last group is not the small one.
    cuts = [0]
    for left in range(n, 0, -1):
        start = cuts[-1]
        fair = ends[start] + (ends[-1] - ends[start]) / left
        stop = bisect_left(ends, fair)
        if stop - 1 > start and fair - ends[stop - 1] < ends[stop] - fair:
            stop -= 1
        while needs[stop] > left - 1:
            stop += 1
        cuts.append(min(stop, reach(start, cap), len(sizes) - (left - 1)))
    return cuts


def _merged(blocks: Sequence[Block]) -> tuple[Range, ...]:
    ranges: list[Range] = []
    for block in blocks:
        if ranges and ranges[-1].dtype == block.dtype:
            ranges[-1] = Range(ranges[-1].start, block.stop, block.dtype)
        else:
            ranges.append(Range(block.start, block.stop, block.dtype))
    return tuple(ranges)
