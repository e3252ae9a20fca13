"""Memory for arrays that are handed out, used again once nobody has any of them.

To get fresh memory costs several times as much as to fill it: the kernel clears every page of it
when it is touched first, and takes it back when it is freed.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

from dtrain.arrays import ALIGNMENT, address

#: Bytes below which an allocator keeps memory itself.
_SMALL = 1 << 16

#: What is kept at most, in use or free: buffers, and their bytes.
_KEPT, _KEPT_BYTES = 16, 1 << 26

#: A buffer that is more times larger than what is wanted is left for something larger.
_TOO_LARGE = 4

#: References to a buffer that nobody has: by the list, a loop's variable and a call's argument.
_ALONE = 3


def room(nbytes: int) -> np.ndarray:
    """Uninitialised bytes on an aligned boundary: uint8, shape (nbytes,)."""
    return _aligned(np.empty(nbytes + ALIGNMENT, np.uint8), nbytes)


class Buffers:
    """Hands out memory, and hands it out again once no array, view or buffer of it is left.

    That is found out by counting references, so that users need not give back anything: an array
    is theirs for as long as they have it.  May be used from several threads.
    """

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []
        self._lock = threading.Lock()

    def room(self, nbytes: int) -> np.ndarray:
        """As :func:`room`, of memory that has been in use before if there is some."""
        if nbytes < _SMALL:
            return room(nbytes)
        wanted = nbytes + ALIGNMENT
        with self._lock:
            best: np.ndarray | None = None
            for whole in self._kept:
                fits = wanted <= whole.size <= wanted * _TOO_LARGE
                smaller = best is None or whole.size < best.size
                if fits and smaller and sys.getrefcount(whole) == _ALONE:
                    best = whole
            if best is None:
                best = np.empty(wanted, np.uint8)
                if wanted <= _KEPT_BYTES:
                    self._keep(best)
            return _aligned(best, nbytes)

    def _keep(self, made: np.ndarray) -> None:
        """What is too much is forgotten, the oldest first; who has an array of it keeps it."""
        self._kept.append(made)
        total = sum(whole.size for whole in self._kept)
        while len(self._kept) > _KEPT or total > _KEPT_BYTES:
            total -= self._kept.pop(0).size


def _aligned(whole: np.ndarray, nbytes: int) -> np.ndarray:
    skip = -address(whole) % ALIGNMENT
    return whole[skip : skip + nbytes]
