"""One BLAS thread per replica, also where several workers share a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from threadpoolctl import threadpool_info, threadpool_limits


def describe() -> str:
    """The BLAS of this process, in words: which, and how many threads while no replica runs."""
    found = [
        f"{lib['internal_api']} {lib['version']}, {lib['num_threads']} threads; 1 while training"
        for lib in threadpool_info()
        if lib["user_api"] == "blas"
    ]
    return " and ".join(found) or "unknown"


_lock = threading.Lock()
_users = 0
_limit: Any = None


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit BLAS to one thread in this process while any replica runs; then as it was before.

    Replicas would fight for the cores otherwise, and the bits of a product may depend on the
    number of threads.
    """
    global _users, _limit
    with _lock:
        if _users == 0:
            _limit = threadpool_limits(1, user_api="blas")
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _limit.restore_original_limits()
                _limit = None
