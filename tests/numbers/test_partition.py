from __future__ import annotations

import json
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.errors import SpecError
from dtrain.layout import Layout
from dtrain.partition import Range, Shard, ShardPlan, _cuts, partition

MODEL = {
    "w0": np.zeros((784, 512), "float32"),
    "b0": np.zeros(512, "float32"),
    "scale": np.zeros((), "float64"),
    "w1": np.zeros((512, 10), "float32"),
    "table": np.zeros((5000, 33), "float64"),
}


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 1000])
def test_shards_tile_the_buffer_and_are_cut_between_blocks(n):
    layout = Layout.of(MODEL)
    plan = partition(layout, n)
    assert len(plan.shards) == min(n, len(layout.blocks))
    assert [shard.index for shard in plan.shards] == list(range(len(plan.shards)))
    bounds = {0} | {block.stop for block in layout.blocks}
    end = 0
    for shard in plan.shards:
        assert shard.nbytes > 0
        assert len({r.dtype for r in shard.ranges}) == len(shard.ranges)
        for r in shard.ranges:
            assert r.start == end
            assert {r.start, r.stop} <= bounds
            (segment,) = (s for s in layout.segments if s.dtype == r.dtype)
            assert segment.start <= r.start < r.stop <= segment.stop
            end = r.stop
    assert end == layout.nbytes
    assert ShardPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_shards_of_a_real_model_are_balanced():
    layout = Layout.of(MODEL)
    for n in (2, 3, 4):
        sizes = [shard.nbytes for shard in partition(layout, n).shards]
        largest_block = max(b.stop - b.start for b in layout.blocks)
        assert max(sizes) - min(sizes) <= 2 * largest_block


def test_a_shard_over_two_dtypes_has_two_ranges():
    layout = Layout.of({"a": np.zeros(3, "float32"), "b": np.zeros(3, "float64")})
    whole = Shard(0, (Range(0, 64, "float32"), Range(64, 128, "float64")))
    assert partition(layout, 1) == ShardPlan((whole,))
    assert whole.nbytes == 128


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.data())
def test_the_largest_group_is_as_small_as_can_be(sizes, data):
    n = data.draw(st.integers(1, len(sizes)))

    def largest(cuts):
        return max(sum(sizes[a:b]) for a, b in pairwise(cuts))

    cuts = _cuts(sizes, n)
    assert cuts[0] == 0
    assert cuts[-1] == len(sizes)
    assert len(cuts) == n + 1
    assert all(a < b for a, b in pairwise(cuts))
    every = ([0, *inner, len(sizes)] for inner in combinations(range(1, len(sizes)), n - 1))
    assert largest(cuts) == min(map(largest, every))


def test_equal_blocks_are_spread_evenly():
    cuts = _cuts([7] * 10, 4)
    assert sorted(b - a for a, b in pairwise(cuts)) == [2, 2, 3, 3]


@pytest.mark.parametrize("n", [0, -1, 1.5, True, None, "two"])
def test_other_numbers_are_refused(n):
    with pytest.raises(SpecError, match=r"shards: found .*, expected a whole number from 1 up"):
        partition(Layout.of(MODEL), n)
