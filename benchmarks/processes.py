"""Processes that obey orders, each over a pipe of its own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from benchmarks import environment

#: Seconds that a process has to get ready, and to answer after what it was told to take.
DEADLINE = 120.0


class Processes:
    """Processes by their names, for a ``with`` block.

    Parameters
    ----------
    bodies : mapping of str to callable
        What each runs, from a module: a function of its end of a pipe, that begins with
        :func:`begin`, sends a first answer, and then answers orders until the pipe closes.
    """

    def __init__(self, bodies: Mapping[str, Callable[[Any], None]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._names = list(bodies)
        self._ends: list[Any] = []
        self._processes: list[Any] = []
        for name, body in bodies.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=body, args=(theirs,), name=name, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        #: name -> its first answer
        self.hellos: dict[str, Any] = {}
        try:
            self.hellos = {name: self.answer(i) for i, name in enumerate(bodies)}
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def count(self) -> int:
        return len(self._names)

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell(self, i: int, order: Any) -> None:
        self._ends[i].send(order)

    def answer(self, i: int, seconds: float = 0.0) -> Any:
        """What process ``i`` says to an order that takes it so long."""
        try:
            if not self._ends[i].poll(DEADLINE + seconds):
                raise RuntimeError(f"{self._names[i]} has not answered in {DEADLINE:.0f} s")
            return self._ends[i].recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(f"{self._names[i]} died; its own traceback says why") from None

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.terminate()
                process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._ends, self._processes = [], []


def begin() -> None:
    """In a process, before all else."""
    # A Ctrl-C on the terminal is for the parent, which ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    environment.check()


def obey(end: Any, act: Callable[[Any], Any]) -> None:
    """Answer orders until the parent closes the pipe."""
    while True:
        order = None
        with suppress(EOFError, ConnectionError):
            order = end.recv()
        if order is None:
            return
        answer = act(order)
        with suppress(ConnectionError):
            end.send(answer)
