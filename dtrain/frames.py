"""Columns of data frames as the numbers that models train on.

A number is itself, a truth value is 0 or 1, and a category is one column for each of its values,
of which one is 1 (*one-hot*, or indicator columns; none is 1 where the category is missing).
What a frame's columns are is found once, from the frame that a model is trained on, and travels
with the model: a frame to predict on is encoded in the same way, whatever categories it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.errors import DataError

#: Sorts of columns.
NUMBER, CATEGORY = "number", "category"


def is_frame(value: Any) -> bool:
    """Whether it is a data frame, of pandas or of Dask."""
    value = _sample(value)
    return hasattr(value, "columns") and hasattr(value, "dtypes") and hasattr(value, "iloc")


def is_series(value: Any) -> bool:
    """Whether it is one column of a data frame, of pandas or of Dask."""
    value = _sample(value)
    return hasattr(value, "dtype") and hasattr(value, "to_frame") and hasattr(value, "isna")


def _sample(value: Any) -> Any:
    """Of a Dask collection its empty sample, if it has one; a Delayed has every other name."""
    return getattr(value, "_meta", None) if hasattr(value, "__dask_graph__") else value


@dataclass(frozen=True)
class Columns:
    """The columns of a frame of features, in their order, and what each of them is.

    Attributes
    ----------
    names : tuple of str
    categories : tuple
        For each column None, if it has numbers, or the tuple of its categories.
    dtype : str
        Of the encoded array: the smallest floating-point type that holds all columns.
    """

    names: tuple[Any, ...]
    categories: tuple[tuple[Any, ...] | None, ...]
    dtype: str

    @classmethod
    def of(cls, frame: Any, name: str) -> Columns:
        """What the columns of a frame are, by its types alone.

        Raises
        ------
        DataError
            Names the column, what it has, and what to do about it.
        """
        names = list(frame.columns)
        if not names:
            raise DataError(f"{name}: found a frame without columns, expected one for each feature")
        twice = [n for n in names if names.count(n) > 1]
        if twice:
            raise DataError(f"{name}: found two columns {twice[0]!r}, expected each name once")
        categories, types = [], [np.dtype(np.float32)]
        for column, dtype in zip(names, frame.dtypes, strict=True):
            known = _categories(f"{name}: column {column!r}", frame[column], dtype)
            categories.append(known)
            if known is None:
                types.append(_number(dtype))
        return cls(tuple(names), tuple(categories), np.result_type(*types).name)

    @property
    def width(self) -> int:
        """How many columns the encoded array has."""
        return sum(1 if known is None else len(known) for known in self.categories)

    @property
    def features(self) -> tuple[str, ...]:
        """A name for each column of the encoded array: ``size``, ``colour=red``, ..."""
        return tuple(
            str(name) if known is None else f"{name}={value}"
            for name, known in zip(self.names, self.categories, strict=True)
            for value in (known or (None,))
        )

    def encode(self, frame: Any, name: str = "X") -> np.ndarray:
        """A pandas frame as an array of shape (rows, ``width``), C-contiguous, of ``dtype``.

        Raises
        ------
        DataError
            A column is missing, has other categories or missing values that no number stands for.
        """
        missing = [column for column in self.names if column not in frame.columns]
        if missing:
            raise DataError(
                f"{name}: found no column {missing[0]!r}, expected {len(self.names)}: "
                f"{', '.join(map(repr, self.names))}"
            )
        out = np.zeros((len(frame), self.width), self.dtype)
        at = 0
        for column, known in zip(self.names, self.categories, strict=True):
            what = f"{name}: column {column!r}"
            if known is None:
                out[:, at] = _numbers(what, frame[column])
                at += 1
                continue
            codes = _codes(what, frame[column], known)
            rows = np.flatnonzero(codes >= 0)
            out[rows, at + codes[rows]] = 1
            at += len(known)
        return out

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "names": list(self.names),
            "categories": [None if known is None else list(known) for known in self.categories],
            "dtype": self.dtype,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Columns:
        known = tuple(None if some is None else tuple(some) for some in values["categories"])
        # Names of several parts are lists in JSON.
        names = tuple(tuple(n) if isinstance(n, list) else n for n in values["names"])
        return cls(names, known, str(values["dtype"]))


def target(column: Any, name: str) -> np.ndarray:
    """A pandas column of targets as an array: numbers, or labels.

    Raises DataError for missing values, and for what is neither.
    """
    dtype = column.dtype
    if _is_categorical(dtype):
        if column.isna().any():
            raise DataError(f"{name}: found missing labels, expected one for each row")
        return _labels(name, column.to_numpy())
    if _is_number(dtype):
        return np.asarray(_numbers(name, column, dtype=None))
    if str(dtype) in ("object", "str", "string") or str(dtype).startswith("string"):
        if column.isna().any():
            raise DataError(f"{name}: found missing labels, expected one for each row")
        return _labels(name, column.to_numpy())
    raise DataError(f"{name}: found dtype {dtype}, expected numbers or labels{_hint(dtype)}")


def _labels(name: str, values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype != object:
        return array
    if all(isinstance(value, str) for value in array):
        return array.astype(str)
    kinds = sorted({type(value).__name__ for value in array})
    raise DataError(f"{name}: found values of type {' and '.join(kinds)}, expected labels")


def _is_categorical(dtype: Any) -> bool:
    return hasattr(dtype, "categories") and hasattr(dtype, "ordered")


def _is_number(dtype: Any) -> bool:
    kind: str = getattr(dtype, "kind", "O")
    return kind in "fiub"


def _number(dtype: Any) -> np.dtype[Any]:
    """NumPy's type for a column of numbers, which may be one of pandas's own."""
    found: np.dtype[Any] = np.dtype(getattr(dtype, "numpy_dtype", dtype))
    return found


def _categories(what: str, column: Any, dtype: Any) -> tuple[Any, ...] | None:
    """None for a column of numbers; for a category its values, which must be known."""
    if _is_categorical(dtype):
        if getattr(getattr(column, "cat", None), "known", True) is False:
            raise DataError(
                f"{what}: found categories that are not known before it is computed; "
                f"call .categorize(), or .cat.as_known() on it, first"
            )
        values = tuple(_plain(value) for value in dtype.categories)
        strange = [v for v in values if not isinstance(v, str | bool | int | float)]
        if strange:
            raise DataError(
                f"{what}: found categories of type {type(strange[0]).__name__}, expected strings "
                f"or numbers"
            )
        if not values:
            raise DataError(f"{what}: found no categories, expected at least one")
        return values
    if _is_number(dtype):
        return None
    raise DataError(f"{what}: found dtype {dtype}, expected numbers or categories{_hint(dtype)}")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _hint(dtype: Any) -> str:
    text = str(dtype)
    if text.startswith(("datetime", "period")):
        return "; take what the model needs of it, such as .dt.hour or .dt.dayofyear"
    if text.startswith("timedelta"):
        return "; .dt.total_seconds() makes numbers of it"
    if text == "object" or text.startswith(("str", "string")):
        return "; .astype('category') makes a category of it (in Dask also .cat.as_known())"
    return ""


def _numbers(what: str, column: Any, dtype: Any = np.float64) -> Any:
    """The values of a pandas column; missing ones of a type that has no NaN are refused."""
    if hasattr(column.dtype, "na_value") and not isinstance(column.dtype, np.dtype):
        if column.isna().any():
            raise DataError(
                f"{what}: found missing values in {column.dtype}, expected numbers; "
                f".fillna(...) or .dropna() before"
            )
        return column.to_numpy(_number(column.dtype))
    return column.to_numpy()


def _codes(what: str, column: Any, known: Sequence[Any]) -> np.ndarray:
    """For each row the place of its category in ``known``, -1 if it is missing; intp."""
    if _is_categorical(column.dtype):
        values, codes = list(column.cat.categories), np.asarray(column.cat.codes, np.intp)
    else:
        import pandas as pd

        codes, found = pd.factorize(column)
        values, codes = list(found), np.asarray(codes, np.intp)
    places = {value: i for i, value in enumerate(known)}
    table = np.array([places.get(_plain(value), -2) for value in values] + [-1], np.intp)
    found = table[codes]
    if (found == -2).any():
        value = values[codes[np.flatnonzero(found == -2)[0]]]
        shown = ", ".join(map(repr, known[:5])) + (", ..." if len(known) > 5 else "")
        raise DataError(f"{what}: found the category {value!r}, expected one of {shown}")
    return found
