"""Cut the flat buffer of a layout into shards."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from dtrain.layout import Block, Layout
from dtrain.spec import whole


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
    blocks = layout.blocks
    cuts = _cuts([b.stop - b.start for b in blocks], min(whole("shards", n), len(blocks)))
    return ShardPlan(
        tuple(Shard(index, _merged(blocks[a:b])) for index, (a, b) in enumerate(pairwise(cuts)))
    )


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
