from __future__ import annotations

import json
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.errors import SpecError
from dtrain.layout import Layout
from dtrain.partition import (
    FixedShards,
    MaxSize,
    MinSize,
    Partitioner,
    Range,
    Shard,
    ShardPlan,
    _cuts,
    assign,
    imbalance,
    partition,
)

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


# -- partitioners ------------------------------------------------------------------------------


def sizes_of(partitioner, params=MODEL):
    return [shard.nbytes for shard in partitioner.split(Layout.of(params)).shards]


def test_fixed_shards():
    assert FixedShards(3).split(Layout.of(MODEL)) == partition(Layout.of(MODEL), 3)


@pytest.mark.parametrize("least", [1, 5_000, 40_000, "100kB", "1MB", "1GB"])
@pytest.mark.parametrize("most", [1, 4, 300])
def test_min_size(least, most):
    partitioner = MinSize(least, max_shards=most)
    sizes = sizes_of(partitioner)
    total = sum(sizes)
    assert len(sizes) <= most
    assert len(sizes) == 1 or min(sizes) >= partitioner.bytes
    if most * 2 <= min(total / partitioner.bytes, 128):
        assert len(sizes) == most


@pytest.mark.parametrize("most", [1, 5_000, "64 KiB", 300_000, "1GB"])
def test_max_size(most):
    layout = Layout.of({**MODEL, "wide": np.zeros((3, 4000), "float32")})
    plan = MaxSize(most).split(layout)
    limit = MaxSize(most).bytes
    bounds = {(b.start, b.stop) for b in layout.blocks}
    for shard in plan.shards:
        whole = {(r.start, r.stop) for r in shard.ranges}
        assert shard.nbytes <= limit or whole <= bounds
    assert sum(shard.nbytes for shard in plan.shards) == layout.nbytes
    if limit >= layout.nbytes:
        assert len(plan.shards) == 1


def test_max_size_makes_as_few_as_can_be():
    """Bytes are scarce where a shard is a message: as few as hold all, and of about one size."""
    params = {"w": np.zeros((1000, 16), "float32")}
    sizes = sizes_of(MaxSize(20_000), params)
    assert len(sizes) == -(-64_000 // 20_000)
    assert max(sizes) - min(sizes) <= 2 * 64_000 // 128


@pytest.mark.parametrize(
    "partitioner", [FixedShards(4), MinSize("4MB", max_shards=9), MaxSize("4 MiB"), MaxSize(17)]
)
def test_partitioners_round_trip_through_json(partitioner):
    again = Partitioner.from_dict(json.loads(json.dumps(partitioner.to_dict())))
    assert again == partitioner
    assert hash(again) == hash(partitioner)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedShards(0), "partitioner.n: found 0, expected a whole number from 1 up"),
        (lambda: MinSize(0, 2), "partitioner.bytes: found 0, expected a size above zero"),
        (lambda: MinSize("4MB", 1.5), "partitioner.max_shards: found 1.5"),
        (lambda: MaxSize("a lot"), "partitioner.bytes: found 'a lot', expected a size above zero"),
        (lambda: MaxSize(True), "partitioner.bytes: found True"),
        (lambda: MaxSize(2.5), "partitioner.bytes: found 2.5"),
        (lambda: MaxSize(None), "partitioner.bytes: found None"),
        (lambda: MaxSize(float("nan")), "partitioner.bytes: found nan"),
        (lambda: MaxSize("-3kB"), "partitioner.bytes: found '-3kB'"),
        (
            lambda: Partitioner.from_dict({"kind": "most"}),
            "partitioner.kind: found 'most', expected 'fixed_shards', 'min_size' or 'max_size'",
        ),
        (
            lambda: Partitioner.from_dict({"kind": "max_size", "n": 3}),
            r"partitioner: found \['n'\] with kind 'max_size', expected \['bytes'\]",
        ),
    ],
)
def test_bad_partitioners_are_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


# -- placement ---------------------------------------------------------------------------------

THREE = ["tcp://a", "tcp://b", "tcp://c"]


def test_round_robin_takes_turns_from_the_chief_on():
    assert assign([1, 2, 3, 4, 5], THREE, "round-robin") == (0, 1, 2, 0, 1)


def test_greedy_gives_the_largest_to_whom_has_least():
    # 5 | 4 + 1 | 3 + 2, and the chief is whoever has shard 0.
    assert assign([1, 5, 2, 4, 3], THREE, "greedy") == (0, 1, 2, 0, 2)
    assert assign([7, 7, 7], THREE, "greedy") == (0, 1, 2)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 7))
def test_greedy_keeps_the_bound_of_graham(sizes, count):
    """Of any order, 1966: the mean, and what of the largest is beside it; the chief has shard 0."""
    workers = [f"tcp://{i}" for i in range(count)]
    where = assign(sizes, workers, "greedy")
    loads = [sum(s for s, w in zip(sizes, where, strict=True) if w == i) for i in range(count)]
    assert count * max(loads) <= sum(sizes) + (count - 1) * max(sizes)
    assert where[0] == 0


def test_a_function_gets_bytes_and_addresses_and_gives_indices():
    seen = []

    def backwards(sizes, workers):
        seen.append((sizes, workers))
        return np.arange(len(sizes))[::-1]

    assert assign([10, 20, 30], THREE, backwards) == (2, 1, 0)
    assert seen == [([10, 20, 30], THREE)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([0, 1], r"returned \[0, 1\], expected 3 indices, one for each shard, from 0 to 2"),
        ([0, 1, 3], "expected 3 indices, one for each shard, from 0 to 2 .3 workers."),
        ([0, -1, 1], "expected 3 indices"),
        ([0, 1, 1.5], "expected 3 indices"),
        (None, "returned None, expected 3 indices"),
        ("012", "returned '012', expected 3 indices"),
        ([1, 2, 1], "at least one shard at worker 0, tcp://a, which has the lead"),
    ],
)
def test_a_bad_answer_says_what_was_expected(answer, message):
    with pytest.raises(SpecError, match=f"placement: its function .*{message}"):
        assign([1, 1, 1], THREE, lambda sizes, workers: answer)


def test_an_unknown_placement_is_refused():
    with pytest.raises(SpecError, match="placement: found 'best', expected 'greedy' or 'round-r"):
        assign([1], THREE, "best")


# -- balance -----------------------------------------------------------------------------------


def dense(*layers, dtype="float32"):
    return {
        name: np.zeros(shape, dtype)
        for i, (a, b) in enumerate(pairwise(layers))
        for name, shape in ((f"w{i}", (a, b)), (f"b{i}", (b,)))
    }


#: Of at least 1,000 parameters.
ASSORTED = {
    "mlp 64-128-10": dense(64, 128, 10),
    "mlp 784-512-10": dense(784, 512, 10),
    "mlp 1024-2048-1000": dense(1024, 2048, 1000),
    "mlp 16-32-16-1": dense(16, 32, 16, 1),
    "linear of 2,000": dense(2000, 1),
    "logistic 100-10": dense(100, 10),
    "one huge table": {"table": np.zeros((200_000, 32), "float32"), **dense(32, 16, 1)},
    "many small": {f"v{i}": np.zeros(3 + i % 5, "float32") for i in range(300)},
    "two dtypes": {**dense(100, 64, 10), "scale": np.zeros((50, 33), "float64")},
    "odd rows": {"a": np.zeros((999, 33), "float64"), **dense(77, 13, 5)},
}


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("params", ASSORTED.values(), ids=ASSORTED)
def test_the_default_shares_the_bytes_evenly(params, workers):
    assert sum(array.size for array in params.values()) >= 1000
    sizes = sizes_of(FixedShards(workers), params)
    where = assign(sizes, [str(i) for i in range(workers)], "greedy")
    loads = [sum(s for s, w in zip(sizes, where, strict=True) if w == i) for i in range(workers)]
    assert sum(loads) == Layout.of(params).nbytes
    assert imbalance(loads) < 0.1


def test_imbalance():
    assert imbalance([3, 3, 3]) == 0
    assert imbalance([6, 2, 1]) == pytest.approx(1.0)
