"""Data by the path of a file: NumPy's npz and npy, parquet, csv and zarr.

NumPy's files are read here; of the others only what their columns are, and the workers read the
rows.  A path is one of this machine, relative to a folder that is given, or a URL of fsspec; it
may have wildcards where a table has several files.
"""

from __future__ import annotations

import glob
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.checks import did_you_mean
from dtrain.errors import DataError


@dataclass(frozen=True)
class Wanted:
    """What of a file: names of arrays or columns, or indices of columns (npy)."""

    features: str | Sequence[str] | Sequence[int] | None = None
    target: str | int | None = None
    sample_weight: str | int | None = None


class Unreadable(Exception):
    """A file cannot be read, or does not have what is wanted; ``key`` says of what, if of that."""

    def __init__(self, text: str, key: str | None = None) -> None:
        super().__init__(text)
        self.key = key


def read(text: str, folder: Path, wanted: Wanted) -> tuple[Any, ...]:
    """X and y, and weights if they are wanted: arrays, or columns of a Dask frame.

    Raises
    ------
    Unreadable, DataError
        What was found and what was expected.
    """
    kind = Path(text.partition("://")[2] or text).name
    for ending, reader in _READERS.items():
        if kind.endswith(ending):
            return reader(_place(text, folder), wanted)
    raise Unreadable(
        f"found {text!r}, expected the path of a file that ends in {', '.join(_READERS)}"
    )


def _place(text: str, folder: Path) -> str:
    """The URL, or the path, of which there is at least one file."""
    if "://" in text:
        return text
    path = folder / Path(text).expanduser()
    if path.exists() or glob.glob(str(path)):
        return str(path)
    raise Unreadable(f"found {text!r}, but there is no file {path}")


# -- NumPy's own ----------------------------------------------------------------------------------


def _npz(place: str, wanted: Wanted) -> tuple[Any, ...]:
    with _readable(place), np.load(_local(place), allow_pickle=False) as archive:
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise Unreadable(f"{place} is a single array, expected an npz archive")
        return _of_arrays(place, wanted, archive.files, lambda name: archive[name])


def _of_arrays(
    place: str, wanted: Wanted, held: Sequence[str], get: Callable[[str], Any]
) -> tuple[Any, ...]:
    """What is wanted of arrays that have names."""
    features = _names("features", wanted.features, ("X", "x"), held, place)
    (target,) = _names("target", wanted.target, ("y",), held, place)
    if isinstance(wanted.features, list | tuple):
        x = _beside({name: get(name) for name in features}, place)
    else:
        x = get(features[0])
    if x.dtype.kind not in "biuf":
        raise DataError(f"the features in {place} are of dtype {x.dtype}, expected numbers")
    if wanted.sample_weight is None:
        return x, get(target)
    (weights,) = _names("sample_weight", wanted.sample_weight, (), held, place)
    return x, get(target), get(weights)


def _beside(arrays: dict[str, Any], place: str) -> Any:
    """Columns, or arrays of columns, side by side."""
    shapes = {name: array.shape for name, array in arrays.items()}
    if {len(shape) for shape in shapes.values()} - {1, 2} or (
        len({shape[0] for shape in shapes.values()}) > 1
    ):
        raise DataError(
            f"data.features: the arrays in {place} have the shapes {shapes}, "
            "expected one or two dimensions and as many rows in each"
        )
    columns = [array if array.ndim == 2 else array[:, None] for array in arrays.values()]
    return np.concatenate(columns, axis=1)


def _names(
    key: str, wanted: Any, usual: tuple[str, ...], held: Sequence[str], place: str
) -> list[str]:
    """The arrays, or columns, that a key means."""
    if wanted is None:
        present = [name for name in usual if name in held]
        if not present:
            raise Unreadable(
                f"not given, and {place} has no array {' or '.join(map(repr, usual))}; "
                f"expected one of its arrays: {', '.join(held)}",
                key,
            )
        return present[:1]
    names = list(wanted) if isinstance(wanted, list | tuple) else [wanted]
    for name in names:
        if name not in held:
            raise Unreadable(
                f"found {name!r}{did_you_mean(name, held)}, "
                f"expected an array of {place}: {', '.join(held)}",
                key,
            )
    return names


def _npy(place: str, wanted: Wanted) -> tuple[Any, ...]:
    with _readable(place):
        table = np.load(_local(place), allow_pickle=False)
    if not isinstance(table, np.ndarray):
        raise Unreadable(f"{place} is an npz archive, expected a single array")
    if table.dtype.kind not in "biuf":
        raise DataError(f"the features in {place} are of dtype {table.dtype}, expected numbers")
    if table.ndim != 2 or table.shape[1] < 2:
        raise DataError(
            f"the array in {place} has the shape {table.shape}, expected "
            "two dimensions, with a column for the target and at least one for the features"
        )
    count = table.shape[1]
    # The last column is the target where none is named, as in most tables.
    target = _column("target", -1 if wanted.target is None else wanted.target, count, place)
    weights = None
    if wanted.sample_weight is not None:
        weights = _column("sample_weight", wanted.sample_weight, count, place)
    if wanted.features is None:
        features = [i for i in range(count) if i not in (target, weights)]
    elif isinstance(wanted.features, list | tuple):
        features = [_column("features", index, count, place) for index in wanted.features]
    else:
        raise Unreadable(
            f"found {wanted.features!r}, expected a list of column indices, as {place} is an "
            "array without names",
            "features",
        )
    for index, what in ((target, "the target"), (weights, "the weights")):
        if index in features:
            raise Unreadable(f"found column {index}, which is {what}", "features")
    rest = () if weights is None else (table[:, weights],)
    return table[:, features], table[:, target], *rest


def _column(key: str, index: Any, count: int, place: str) -> int:
    if not isinstance(index, int) or not -count <= index < count:
        raise Unreadable(
            f"found {index!r}, expected the index of a column of {place}, "
            f"from {-count} to {count - 1}",
            key,
        )
    return index % count


def _local(place: str) -> str:
    if "://" in place:
        raise Unreadable(f"found {place!r}, expected a path: this kind of file is read from a disk")
    return place


@contextmanager
def _readable(place: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        # NumPy's own words propose to allow pickles, which run code: never here.
        if "Object arrays" in str(error):
            text = f"an array in {place} holds Python objects, expected numbers or text"
        else:
            text = f"{place} is damaged or not a {Path(place).suffix} file"
        raise Unreadable(text) from error
    except OSError as error:
        raise Unreadable(f"{place} cannot be read: {error.strerror or error}") from error


# -- tables, and arrays in chunks -----------------------------------------------------------------


def _parquet(place: str, wanted: Wanted) -> tuple[Any, ...]:
    return _table(place, wanted, lambda dd: dd.read_parquet(place))


def _csv(place: str, wanted: Wanted) -> tuple[Any, ...]:
    # Compressed files have no places to begin in.
    compressed = not place.endswith(".csv")
    extra = {"blocksize": None} if compressed else {}
    return _table(place, wanted, lambda dd: dd.read_csv(place, **extra))


def _table(place: str, wanted: Wanted, open_: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Columns of a Dask frame; only their names and types are looked at here."""
    with _opening(place, "dataframe", "pandas and pyarrow"):
        import dask.dataframe as dd

        frame = open_(dd)
    held = [str(name) for name in frame.columns]
    if wanted.target is None:
        raise Unreadable(
            f"not given; expected one of the columns of {place}: {', '.join(held)}", "target"
        )
    (target,) = _names("target", wanted.target, (), held, place)
    weights = []
    if wanted.sample_weight is not None:
        weights = _names("sample_weight", wanted.sample_weight, (), held, place)
    if wanted.features is None:
        features = [name for name in held if name not in (target, *weights)]
    else:
        features = _names("features", wanted.features, (), held, place)
    if target in features:
        raise Unreadable(f"found {target!r}, which is the target", "features")
    return frame[features], frame[target], *(frame[name] for name in weights)


def _zarr(place: str, wanted: Wanted) -> tuple[Any, ...]:
    with _opening(place, "zarr", "zarr"):
        import dask.array as da
        import zarr

        store = zarr.open_group(place, mode="r")
        held = sorted(name for name, _ in store.arrays())

    def get(name: str) -> Any:
        array = da.from_zarr(place, component=name)
        # Chunks of rows alone: each is read by whoever needs its rows.
        return array.rechunk(dict.fromkeys(range(1, array.ndim), -1))

    return _of_arrays(place, wanted, held, get)


@contextmanager
def _opening(place: str, extra: str, packages: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise Unreadable(
            f"to read {place} takes {packages}, which cannot be imported ({error}); "
            f"pip install 'dtrain[{extra}]' brings what it takes"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        words = str(error).strip().partition("\n")[0] or type(error).__name__
        raise Unreadable(f"{place} cannot be read: {words}") from error


#: How each kind of file is read, by the end of its name.
_READERS: dict[str, Callable[[str, Wanted], tuple[Any, ...]]] = {
    ".npz": _npz,
    ".npy": _npy,
    ".parquet": _parquet,
    ".csv": _csv,
    ".csv.gz": _csv,
    ".zarr": _zarr,
}
