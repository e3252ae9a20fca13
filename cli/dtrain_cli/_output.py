"""What a command prints, and its exit code.

People's results and the one object of ``--json`` go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

from dtrain_cli._signals import INTERRUPTED, interruptible

if TYPE_CHECKING:
    from rich.console import Console

SUCCEEDED, FAILED, REFUSED, NO_CLUSTER = 0, 1, 2, 3

#: What the JSON object is when a command ends by an error: of its class and its message.
Failure = Callable[[str, str], dict[str, Any]]


def plain_failure(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message}}


#: Control characters, but the ends of lines.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Report:
    """What one command has to say. It is said when the command ends, once.

    Attributes
    ----------
    document : dict or None
        The object for ``--json``.
    show : callable
        Prints the same for people, on a console that writes to stdout.
    code : int
        The exit code.
    failure : callable
        Makes the document of a command that an error ended.
    """

    def __init__(self, as_json: bool, failure: Failure) -> None:
        self.as_json = as_json
        self.failure = failure
        self.document: dict[str, Any] | None = None
        self.show: Callable[[Console], None] = lambda _: None
        self.code = SUCCEEDED
        self._stdout = sys.stdout
        self._release: Callable[[], object] = lambda: None

    def note(self, text: str) -> None:
        """Tell people something on stderr."""
        print(plain(text), file=sys.stderr, flush=True)

    def fail(self, code: int, kind: str, message: str) -> None:
        self.code = code
        self.document = self.failure(kind, message)
        self.show = lambda _: None
        self.note(f"dtrain: {message}")

    def end(self) -> None:
        if self.as_json:
            document = self.document or self.failure("Interrupted", "interrupted")
            text = json.dumps(clean(document), allow_nan=False)
            print(text, file=self._stdout, flush=True)
        else:
            self.show(_console())

    @contextmanager
    def stdout_kept(self) -> Iterator[None]:
        """With ``--json``: what others print, here or in worker processes, goes to stderr."""
        if not self.as_json:
            yield
            return
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
        self._release = lambda: os.dup2(kept, 1)
        try:
            with redirect_stdout(sys.stderr):
                yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)

    def last_words(self) -> None:
        """For an exit at once: only the JSON object that is promised."""
        if self.as_json:
            self._release()
            self.end()


@contextmanager
def command(as_json: bool, failure: Failure = plain_failure) -> Iterator[Report]:
    """Run the body of a command: errors of dtrain become a message and an exit code."""
    from dtrain import (
        CheckpointError,
        ClusterError,
        DataError,
        DTrainError,
        JobNotFound,
        SessionNotFound,
        SpecError,
    )

    report = Report(as_json, failure)
    with ExitStack() as stack:
        stack.enter_context(report.stdout_kept())
        stack.enter_context(warnings_in_words(report))
        stack.enter_context(interruptible(_interrupt, report.last_words))
        try:
            yield report
        except DTrainError as error:
            if isinstance(error, ClusterError):
                code = NO_CLUSTER
            else:
                kinds = SpecError | DataError | JobNotFound | SessionNotFound | CheckpointError
                refused = isinstance(error, kinds)
                code = REFUSED if refused else FAILED
            report.fail(code, type(error).__name__, str(error))
        except KeyboardInterrupt:
            report.fail(INTERRUPTED, "Interrupted", "interrupted")
        except Exception as error:
            # A defect of ours: the traceback is wanted, and so is the promised object.
            report.document = report.failure(type(error).__name__, str(error))
            if as_json:
                report.last_words()
            raise
    report.end()
    raise typer.Exit(report.code)


def _interrupt() -> None:
    raise KeyboardInterrupt


@contextmanager
def warnings_in_words(report: Report) -> Iterator[None]:
    """Those of dtrain are for people: a line, without the place in our code."""
    from dtrain import ClusterWarning

    with warnings.catch_warnings():
        plainly = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
            if issubclass(category, ClusterWarning):
                report.note(f"dtrain: warning: {message}")
            else:
                plainly(message, category, *place)

        warnings.showwarning = show  # type: ignore[assignment]
        yield


def clean(value: Any) -> Any:
    """``value`` in the terms of JSON: NaN and infinities are null, arrays are lists."""
    if hasattr(value, "tolist"):  # NumPy's arrays and scalars
        value = value.tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [clean(item) for item in value]
    return str(value)


def _console() -> Console:
    from rich.console import Console

    # Users' names may hold brackets, which are no markup; a pipe has no width to wrap at.
    width = None if sys.stdout.isatty() else 10_000
    return Console(file=sys.stdout, markup=False, highlight=False, emoji=False, width=width)


def pairs(rows: Mapping[str, Any]) -> Callable[[Console], None]:
    """A table of names and values, without the values that are None."""

    def show(console: Console) -> None:
        from rich.table import Table

        table = Table.grid(padding=(0, 3))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            if value is not None:
                table.add_row(name, number(value))
        console.print(table)

    return show


def columns(headings: list[str], rows: list[list[Any]]) -> Callable[[Console], None]:
    def show(console: Console) -> None:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*map(number, row))
        console.print(table)

    return show


def when(seconds: float | None) -> str | None:
    """A time of the clock, on this machine's calendar."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else None


def plain(text: str) -> str:
    """``text`` with what a terminal would obey escaped: users' names may hold any character."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def number(value: Any) -> str:
    """A value for people: four digits of a float, "-" for what is not there."""
    if value is None:
        return "-"
    return (
        f"{value:.4g}"
        if isinstance(value, float) and abs(value) < 1e4
        else (f"{value:,.0f}" if isinstance(value, float) else plain(str(value)))
    )
