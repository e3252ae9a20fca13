"""Columns of pandas frames as numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from dask import delayed

from dtrain.errors import DataError
from dtrain.frames import Columns, is_frame, is_series, target

pd = pytest.importorskip("pandas", reason="pandas is not installed (the extra dataframe)")


def frame(**columns):
    return pd.DataFrame(columns)


FRAME = frame(
    size=np.array([1.5, -2, np.nan], np.float32),
    count=pd.array([3, 4, 5], dtype="Int16"),
    open=[True, False, True],
    colour=pd.Categorical(["red", "blue", None], categories=["blue", "green", "red"]),
)
ENCODED = [[1.5, 3, 1, 0, 0, 1], [-2, 4, 0, 1, 0, 0], [np.nan, 5, 1, 0, 0, 0]]


def test_numbers_and_categories():
    columns = Columns.of(FRAME, "X")
    found = columns.encode(FRAME)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array(ENCODED, np.float32))
    assert columns.width == 6
    assert columns.features == (
        "size", "count", "open", "colour=blue", "colour=green", "colour=red",
    )  # fmt: skip
    assert found.flags.c_contiguous


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([1], np.float64), "float64"),
        (np.array([1], np.int64), "float64"),
        (np.array([1], np.int16), "float32"),
        (np.array([True]), "float32"),
        (pd.array([1.0], dtype="Float64"), "float64"),
    ],
)
def test_the_type_holds_all_columns(values, dtype):
    assert Columns.of(frame(a=values), "X").dtype == dtype


def test_another_frame_is_encoded_in_the_same_way():
    """By names, whatever else it has, and with categories by their values."""
    columns = Columns.from_dict(json.loads(json.dumps(Columns.of(FRAME, "X").to_dict())))
    assert columns == Columns.of(FRAME, "X")
    other = frame(
        colour=["green", "red", None], more=["a", "b", "c"], open=[1, 0, 0],
        count=[1, 2, 3], size=[0.5, 0.25, 0],
    )  # fmt: skip
    other["colour"] = other["colour"].astype("category")
    expected = [[0.5, 1, 1, 0, 1, 0], [0.25, 2, 0, 0, 0, 1], [0, 3, 0, 0, 0, 0]]
    np.testing.assert_array_equal(columns.encode(other), expected)
    plain = other.assign(colour=other["colour"].astype(object))
    np.testing.assert_array_equal(columns.encode(plain), expected)
    assert columns.encode(other[:0]).shape == (0, 6)


def test_an_index_that_repeats_itself_is_no_hindrance():
    columns = Columns.of(FRAME, "X")
    np.testing.assert_array_equal(columns.encode(FRAME.set_axis([0, 0, 1])), columns.encode(FRAME))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (frame(a=["x", "y"]), r"X: column 'a': found dtype (object|str), .*\.astype\('category'\)"),
        (frame(a=pd.to_datetime(["2020-01-01"])), r"X: column 'a': found dtype datetime64.*\.dt\."),
        (frame(a=pd.to_timedelta(["1h"])), r"total_seconds\(\) makes numbers"),
        (frame(), "X: found a frame without columns"),
        (frame(a=pd.Categorical([None])), "column 'a': found no categories"),
        (
            frame(a=pd.Categorical(pd.to_datetime(["2020-01-01"]))),
            "column 'a': found categories of type Timestamp",
        ),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "X: found two columns 'a'"),
    ],
)
def test_columns_that_are_no_numbers(changed, words):
    with pytest.raises(DataError, match=words):
        Columns.of(changed, "X")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (FRAME.drop(columns="open"), "X: found no column 'open', expected 4: 'size', 'count',"),
        (
            FRAME.assign(count=pd.array([3, None, 5], dtype="Int16")),
            r"X: column 'count': found missing values in Int16, .*fillna",
        ),
        (
            FRAME.assign(colour=pd.Categorical(["red", "black", "red"])),
            "X: column 'colour': found the category 'black', expected one of 'blue', 'green', 're",
        ),
    ],
)
def test_frames_that_do_not_fit(changed, words):
    with pytest.raises(DataError, match=words):
        Columns.of(FRAME, "X").encode(changed)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pd.Series([1, 2]), np.array([1, 2])),
        (pd.Series([1.5, np.nan]), np.array([1.5, np.nan])),
        (pd.Series([1, 2], dtype="Int64"), np.array([1, 2])),
        (pd.Series([True, False]), np.array([True, False])),
        (pd.Series(["b", "a"]), np.array(["b", "a"])),
        (pd.Series(["b", "a"], dtype="category"), np.array(["b", "a"])),
        (pd.Series([3, 1], dtype="category"), np.array([3, 1])),
    ],
)
def test_targets(column, expected):
    found = target(column, "y")
    np.testing.assert_array_equal(found, expected)
    assert found.dtype.kind == expected.dtype.kind


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pd.Series(["a", None]), "y: found missing labels"),
        (pd.Series(["a", None], dtype="category"), "y: found missing labels"),
        (pd.Series([1, None], dtype="Int64"), "y: found missing values in Int64"),
        (pd.Series(pd.to_datetime(["2020-01-01"])), "y: found dtype datetime64"),
        (pd.Series(["a", 1], dtype=object), "y: found values of type int and str"),
    ],
)
def test_targets_that_are_none(column, words):
    with pytest.raises(DataError, match=words):
        target(column, "y")


def test_names_of_several_parts_come_back_from_json():
    names = pd.MultiIndex.from_tuples([("a", 1), ("b", 2)])
    columns = Columns.of(pd.DataFrame([[1.0, 2.0]], columns=names), "X")
    assert Columns.from_dict(json.loads(json.dumps(columns.to_dict()))) == columns


def test_what_is_a_frame():
    lazy = delayed(lambda: FRAME)()
    assert not is_frame(lazy)
    assert not is_series(lazy)
    assert is_frame(FRAME)
    assert not is_series(FRAME)
    assert is_series(FRAME["size"])
    assert not is_frame(FRAME["size"])
    assert not is_frame(np.ones((2, 2)))
    assert not is_series(np.ones(2))
