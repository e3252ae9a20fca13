"""Ctrl-C and SIGTERM: what a first and what a second one do."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130


@contextmanager
def interruptible(
    on_first: Callable[[], None], last_words: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls ``on_first``; the next one ends the process at once."""
    seen = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            last_words()
            _leave()
        elif _held.depth:
            _held.call = on_first
        else:
            on_first()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


#: What is still to be done when we leave at once.
_duties: list[Callable[[], object]] = []


@contextmanager
def on_leaving(duty: Callable[[], object]) -> Iterator[None]:
    """``duty`` is done if we leave at once while in here."""
    _duties.append(duty)
    try:
        yield
    finally:
        _duties.remove(duty)


def _leave() -> None:
    """Leave nothing behind, and wait for nobody."""
    for child in multiprocessing.active_children():
        child.kill()
    for duty in reversed(_duties):
        with suppress(Exception):
            duty()
    os._exit(INTERRUPTED)


class _Held:
    """A first interrupt that waits until a cluster has been made, and can be closed in order."""

    depth = 0
    call: Callable[[], None] | None = None


_held = _Held()


@contextmanager
def sparing_children() -> Iterator[None]:
    """Processes started in here do not get the Ctrl-C of the terminal, which is for us alone.

    Dask's worker processes would die of it with a traceback each, before we could close them in
    order.  The block is inherited by the threads that start them, and by the later ones; a Ctrl-C
    or SIGTERM meanwhile waits until the end.
    """
    _start_tracker()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    _held.depth += 1
    try:
        yield
    finally:
        _held.depth -= 1
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        call, _held.call = _held.call, None
        if call is not None:
            call()


def _start_tracker() -> None:
    """Python's own process that removes what we leave behind when we end at once.

    Started by the first worker, it would unblock SIGINT again; and it would warn of each thing.
    """
    from multiprocessing import resource_tracker

    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before
