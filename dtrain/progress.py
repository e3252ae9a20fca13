"""The progress bar: loss, samples per second, time left; on stderr."""

from __future__ import annotations

import sys
from typing import Any


def wanted(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress


#: From this many columns of the terminal on there is room for the metrics of the validation.
_WIDE = 100

#: The most characters of a label.
_LABEL = 20


class Bar:
    """A rich progress bar that follows a job's status; one line of 80 columns holds it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            Task,
            TextColumn,
        )
        from rich.table import Column
        from rich.text import Text

        class TimeLeft(ProgressColumn):
            max_refresh = 0.5

            def render(self, task: Task) -> Text:
                words = "" if task.finished else left(task.time_remaining)
                return Text(words, "progress.remaining", no_wrap=True)

        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[words]}", table_column=Column(no_wrap=True)),
            TimeLeft(Column(no_wrap=True)),
            console=Console(stderr=True),
            transient=False,
            expand=True,
        )
        self._task = self._progress.add_task("PREPARING", total=None, words="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def update(self, status: dict[str, Any]) -> None:
        """Show what the master says of the job."""
        done, total = _steps(status)
        words = []
        if status["loss"] is not None:
            words.append(f"loss {number(status['loss'])}")
        if self._progress.console.width >= _WIDE:
            words += [
                f"{name} {number(value)}"
                for name, value in status["metrics"].items()
                if name.startswith("val_") and name != "val_loss"
            ]
        if status["samples_per_s"]:
            words.append(f"{status['samples_per_s']:,.0f} samples/s")
        label = str(status["name"] or status["id"])
        label = label if len(label) <= _LABEL else f"{label[: _LABEL - 1]}…"
        if status["state"] != "RUNNING":
            label = f"{label} {status['state']}"
        self._progress.update(
            self._task,
            completed=done,
            total=total,
            # A name of the user's is text, never markup.
            description=label.replace("[", r"\["),
            words="  ".join(words),
        )


def number(value: float) -> str:
    """As wide as the last one, so that the line does not tremble; but for the large and small."""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def left(seconds: float | None) -> str:
    """Time left, for people."""
    if seconds is None:
        return ""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} left"


def _steps(status: dict[str, Any]) -> tuple[int, int | None]:
    """Steps done and steps in all."""
    return int(status["step"]), status["total_steps"]
