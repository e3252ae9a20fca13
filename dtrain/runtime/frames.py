"""Keeps Dask's profiler from stopping a process for ever.

It asks for the frames of all threads every 10 ms.  In Python 3.11 ``sys._current_frames``
allocates while it holds the lock of the list of threads (CPython's issue 106883, Dask's 8616).  If
that sets off a garbage collection whose finalizers let go of the interpreter, and another thread
then begins or ends, each waits for the other: the whole process stands still.  From 3.12 on garbage
is not collected there.
"""

from __future__ import annotations

import functools
import gc
import sys
from types import FrameType


def guard() -> None:
    """Have no garbage collected during the call, in this process."""
    original = sys._current_frames
    if sys.version_info >= (3, 12) or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def current_frames() -> dict[int, FrameType]:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return original()
        finally:
            if enabled:
                gc.enable()

    sys._current_frames = current_frames
