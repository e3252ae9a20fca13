from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.arrays import ALIGNMENT, address, aligned_bytes, to_numpy
from dtrain.errors import SpecError
from dtrain.layout import BLOCK_ELEMENTS, BLOCKS, Layout, Segment

shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 100_000)),
    st.tuples(st.integers(1, 3000), st.integers(1, 70)),
    st.tuples(st.integers(1, 40), st.integers(1, 20_000)),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
)
models = st.lists(
    st.tuples(shapes, st.sampled_from(["float32", "float64"])), min_size=1, max_size=6
).map(lambda items: {f"v{i}": np.zeros(shape, dtype) for i, (shape, dtype) in enumerate(items)})


def filled(params, seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(v.shape).astype(v.dtype) for k, v in params.items()}


MIXED = {
    "a": np.zeros((3, 5), "float32"),
    "b": np.zeros(7, "float64"),
    "c": np.zeros((), "float32"),
    "d": np.zeros((2, 3, 4), "float64"),
}


def test_one_segment_for_each_dtype_in_order_of_appearance():
    layout = Layout.of(MIXED)
    assert layout.segments == (Segment("float32", 0, 128), Segment("float64", 128, 384))
    assert layout.nbytes == 384
    assert [(v.name, v.shape, v.dtype, v.offset) for v in layout.variables] == [
        ("a", (3, 5), "float32", 0),
        ("b", (7,), "float64", 128),
        ("c", (), "float32", 64),
        ("d", (2, 3, 4), "float64", 192),
    ]


def test_views_write_read(xp):
    layout = Layout.of(MIXED)
    params = filled(MIXED)
    buffer = aligned_bytes(layout.nbytes + 40, xp)
    layout.write(buffer, params)
    views = layout.views(buffer)
    assert list(views) == list(params)
    for name, view in views.items():
        assert view.shape == params[name].shape
        assert view.dtype == params[name].dtype
        assert address(view) % ALIGNMENT == 0
        assert np.array_equal(to_numpy(view), params[name])
    copies = layout.read(buffer)
    views["a"][0, 0] = 99
    views["c"][...] = 98
    assert float(layout.read(buffer)["a"][0, 0]) == 99  # a view, also of one number
    assert float(layout.read(buffer)["c"]) == 98
    assert np.array_equal(copies["a"], params["a"])  # a copy
    used = np.zeros(buffer.size, bool)
    for v in layout.variables:
        used[v.offset : v.offset + v.nbytes] = True
    assert not to_numpy(buffer)[~used].any()


@settings(max_examples=60, deadline=None)
@given(models)
def test_variables_tile_their_segments_without_overlap(params):
    layout = Layout.of(params)
    end = 0
    for segment in layout.segments:
        assert segment.start == end
        assert segment.start % ALIGNMENT == 0
        own = sorted(
            (v for v in layout.variables if v.dtype == segment.dtype), key=lambda v: v.offset
        )
        for v in own:
            assert v.offset == end
            end = -(-(end + v.nbytes) // ALIGNMENT) * ALIGNMENT
        assert segment.stop == end
    assert layout.nbytes == end


@settings(max_examples=60, deadline=None)
@given(models)
def test_blocks_tile_the_buffer_in_whole_rows(params):
    layout = Layout.of(params)
    by_name = {v.name: v for v in layout.variables}
    end = 0
    for block in layout.blocks:
        assert block.start == end
        end = block.stop
        v = by_name[block.variable]
        assert block.dtype == v.dtype
        array = params[v.name]
        row = array[0].nbytes if array.ndim > 1 else array.itemsize
        assert (block.start - v.offset) % row == 0
        stop = min(block.stop, v.offset + v.nbytes)
        assert (stop - v.offset) % row == 0
        assert stop > block.start
        size = stop - block.start
        fair = min(max(layout.nbytes // BLOCKS, ALIGNMENT), BLOCK_ELEMENTS * array.itemsize)
        assert size <= max(fair, row)
        if row * ALIGNMENT // math.gcd(row, ALIGNMENT) <= fair:
            assert block.start % ALIGNMENT == 0
    assert end == layout.nbytes


def test_blocks_follow_the_size_of_the_model():
    """Of a small one there are enough to share evenly; of a large one all are full."""

    def sizes(rows):
        blocks = Layout.of({"w": np.zeros((rows, 64), "float32")}).blocks
        return [b.stop - b.start for b in blocks[:-1]]

    assert set(sizes(8)) == {64 * 4}  # a row is the least
    assert set(sizes(1000)) == {7 * 64 * 4}  # 1 / 128 would be 7.8 rows
    assert set(sizes(1 << 18)) == {BLOCK_ELEMENTS * 4}
    vector = Layout.of({"b": np.zeros(1000, "float32")}).blocks
    assert {b.stop - b.start for b in vector[:-1]} == {ALIGNMENT}


def test_very_long_rows_are_blocks_of_their_own():
    blocks = Layout.of({"w": np.zeros((5, 50_001), "float32")}).blocks
    assert [b.stop - b.start for b in blocks[:-1]] == [50_001 * 4] * 4


@settings(max_examples=30, deadline=None)
@given(models)
def test_round_trip_through_json_and_pickle(params):
    layout = Layout.of(params)
    again = Layout.from_dict(json.loads(json.dumps(layout.to_dict())))
    assert again == layout
    assert hash(again) == hash(layout)
    assert pickle.loads(pickle.dumps(layout)).blocks == again.blocks


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "found dict {}, expected a dict of arrays, not empty"),
        ([np.zeros(2)], "found list .*expected a dict of arrays"),
        ({"": np.zeros(2)}, "found the name ''"),
        ({3: np.zeros(2)}, "found the name 3"),
        ({"a": np.zeros((2, 0))}, r"params\['a'\]: found shape \(2, 0\)"),
        ({"a": np.zeros(2, "int64")}, r"params\['a'\]: found int64 of shape \(2,\), expected"),
        ({"a": np.zeros(2, "float16")}, r"params\['a'\]: found float16"),
        ({"a": np.zeros(2, ">f4")}, r"params\['a'\]: found >f4"),
        ({"a": [1.0]}, r"params\['a'\]: found list \[1.0\], expected an array"),
    ],
)
def test_of_refuses(params, message):
    with pytest.raises(SpecError, match=message):
        Layout.of(params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("b"), r"'b' is missing: found \['a', 'c', 'd'\], expected"),
        (lambda p: p.update(e=p["a"]), "'e' is unknown: expected only"),
        (
            lambda p: p.update(a=p["a"].T),
            r"'a': found float32 of shape \(5, 3\), expected float32 of shape \(3, 5\)",
        ),
        (
            lambda p: p.update(b=p["b"].astype("float32")),
            r"'b': found float32 of shape \(7,\), expected float64 of shape \(7,\)",
        ),
        (lambda p: p.update(c=1.0), "'c': found float 1.0, expected float32"),
    ],
)
def test_check_and_write_refuse_and_write_nothing(change, message):
    layout = Layout.of(MIXED)
    layout.check(MIXED)
    buffer = aligned_bytes(layout.nbytes)
    params = filled(MIXED)
    change(params)
    for refuse in (lambda: layout.check(params), lambda: layout.write(buffer, params)):
        with pytest.raises(ValueError, match=message):
            refuse()
    assert not buffer.any()
    with pytest.raises(ValueError, match="found NoneType None, expected a dict"):
        layout.check(None)


@pytest.mark.parametrize(
    "buffer", [np.zeros(383, "uint8"), np.zeros(384, "float32"), np.zeros((2, 384), "uint8")]
)
def test_views_refuse_a_buffer_that_does_not_fit(buffer):
    with pytest.raises(ValueError, match=r"buffer: found .*, expected uint8 of shape \(384,\)"):
        Layout.of(MIXED).views(buffer)


def test_views_of_read_only_memory_are_read_only():
    layout = Layout.of(MIXED)
    buffer = aligned_bytes(layout.nbytes)
    buffer.flags.writeable = False
    assert not any(view.flags.writeable for view in layout.views(buffer).values())


def test_what_blocks_belong_to_and_where_they_begin():
    layout = Layout.of(
        {
            "a": np.zeros((300, 7), np.float32),
            "b": np.zeros(40, np.float64),
            "c": np.zeros(9, np.float32),
        }
    )
    names = [layout.variables[i].name for i in layout.block_variables]
    assert names == [block.variable for block in layout.blocks]
    assert len(layout.block_starts) == len(layout.segments) == 2
    for segment, starts in zip(layout.segments, layout.block_starts, strict=True):
        size = np.dtype(segment.dtype).itemsize
        found = [int(s) * size + segment.start for s in starts]
        assert found == [b.start for b in layout.blocks if b.dtype == segment.dtype]
