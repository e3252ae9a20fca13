"""The progress bar: loss, samples per second, time left; on stderr."""

from __future__ import annotations

import sys
from typing import Any


def wanted(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress


class Bar:
    """A rich progress bar that follows a job's status."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=False,
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
            words.append(f"loss {status['loss']:.4f}")
        words += [
            f"{name} {value:.4f}"
            for name, value in status["metrics"].items()
            if name.startswith("val_") and name != "val_loss"
        ]
        if status["samples_per_s"]:
            words.append(f"{status['samples_per_s']:,.0f} samples/s")
        label = status["name"] or status["id"]
        # A name of the user's is text, never markup.
        description = f"{label} {status['state']}".replace("[", r"\[")
        self._progress.update(
            self._task, completed=done, total=total, description=description, words="  ".join(words)
        )


def _steps(status: dict[str, Any]) -> tuple[int, int | None]:
    """Steps done and steps in all, as far as they can be told."""
    done = int(status["step"])
    if status["steps"] is not None:
        return done, int(status["steps"])
    history = status["history"]
    if history:
        return done, history[0]["step"] * int(status["epochs"])
    return done, None
