"""Scratch memory of a model, so that a step in steady state allocates no arrays."""

from __future__ import annotations

import math
import threading
from types import ModuleType
from typing import Any

import numpy as np

from dtrain.arrays import Array, aligned_bytes, xp_of

#: Views are remembered for each number of rows; past this many they are made anew.
_MAX_VIEWS = 512


class Workspace:
    """Named arrays of ``xp`` that grow to the largest batch and are cut for smaller ones."""

    def __init__(self, xp: ModuleType, dtype: np.dtype[Any]) -> None:
        self.xp = xp
        self.dtype = dtype
        self._flat: dict[str, Array] = {}
        self._views: dict[tuple[str, int, tuple[int, ...]], Array] = {}

    def get(self, name: str, rows: int, tail: tuple[int, ...] = (), dtype: Any = None) -> Array:
        """An array of shape ``(rows, *tail)`` whose contents are whatever was left there.

        The same name is the same memory; it always has the same dtype (None: the workspace's).
        """
        view = self._views.get((name, rows, tail))
        return view if view is not None else self._view(name, rows, tail, dtype)

    def row_starts(self, rows: int, width: int) -> Array:
        """``arange(rows) * width``, int64: where each row starts in a flattened (rows, width)."""
        key = ("row_starts", rows, (width,))
        view = self._views.get(key)
        if view is None:
            view = self._remember(key, self.xp.arange(rows, dtype=np.int64) * width)
        return view

    def _view(self, name: str, rows: int, tail: tuple[int, ...], dtype: Any) -> Array:
        size = rows * math.prod(tail)
        flat = self._flat.get(name)
        if flat is None or flat.size < size:
            # Views of the old memory would keep it alive.
            self._views = {key: view for key, view in self._views.items() if key[0] != name}
            flat = self._flat[name] = self._empty(size, dtype or self.dtype)
        return self._remember((name, rows, tail), flat[:size].reshape((rows, *tail)))

    def _empty(self, size: int, dtype: Any) -> Array:
        dtype = np.dtype(dtype)
        return aligned_bytes(size * dtype.itemsize, self.xp).view(dtype)

    def _remember(self, key: tuple[str, int, tuple[int, ...]], view: Array) -> Array:
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        self._views[key] = view
        return view


class Workspaces(threading.local):
    """One workspace for each thread, array module and dtype."""

    def __init__(self) -> None:
        self._by_kind: dict[tuple[str, str], Workspace] = {}

    def like(self, array: Array) -> Workspace:
        """The workspace of this thread for arrays such as ``array``."""
        xp, dtype = xp_of(array), array.dtype
        key = (xp.__name__, dtype.char)
        space = self._by_kind.get(key)
        if space is None:
            space = self._by_kind[key] = Workspace(xp, dtype)
        return space
