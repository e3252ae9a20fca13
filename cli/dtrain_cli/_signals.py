"""Ctrl-C and SIGTERM: what a first and what a second one do."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130


@contextmanager
def interruptible(
    on_first: Callable[[], None], last_words: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls ``on_first``; the next one ends the process at once.

    Ending at once is safe: the worker processes of an embedded cluster watch their parent.
    """
    seen = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            on_first()
        else:
            last_words()
            os._exit(INTERRUPTED)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def sparing_children() -> Iterator[None]:
    """Processes started in here do not get the Ctrl-C of the terminal, which is for us alone.

    Dask's worker processes would die of it with a traceback each, before we could close them in
    order.  The block is inherited by the threads that start them, and by the later ones; a Ctrl-C
    meanwhile waits until the end.
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # its first start would unblock SIGINT again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
