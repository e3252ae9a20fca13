"""The words for devices: where a replica computes, and which workers can."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from dtrain.errors import SpecError

#: So many workers are told of in an error.
_TOLD = 8

_DEVICE = re.compile(r"cpu|auto|cuda(?::(?P<number>0|[1-9]\d{0,5}))?")

#: The scopes that are open in this thread or task, the innermost last.
_scopes: ContextVar[tuple[str, ...]] = ContextVar("dtrain_devices", default=())


def check_device(value: Any, key: str = "device") -> str:
    """``value`` if it is the word for a device, or a SpecError that names ``key``."""
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise SpecError(
            f"{key}: found {value!r}, expected 'cpu', 'cuda', 'cuda:<number>' or 'auto'"
        )
    return value


def number_of(device: str) -> int:
    """N of ``"cuda:N"``; 0 of ``"cuda"``, which is the first."""
    match = _DEVICE.fullmatch(device)
    assert match is not None, device
    return int(match["number"] or 0)


class device:
    """The device of the jobs that are made inside a ``with`` block.

    As TensorFlow's ``tf.device``: the innermost block counts, a job's own ``device=`` goes before
    it, and a block is of the thread or the asyncio task that opens it alone.  The object can be
    used again, also within its own block.

    Parameters
    ----------
    name : str
        ``"cpu"``: NumPy.  ``"cuda"``, ``"cuda:<number>"``: CuPy on that GPU of each worker, the
        first by default; workers without one have no part in the job.  ``"auto"``: the first GPU
        of a worker that has one, else its CPU.

    Raises
    ------
    SpecError
        For another word.
    """

    def __init__(self, name: str) -> None:
        self.name = check_device(name)

    def __enter__(self) -> device:
        _scopes.set((*_scopes.get(), self.name))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _scopes.set(_scopes.get()[:-1])

    def __repr__(self) -> str:
        return f"device({self.name!r})"


def current_device() -> str:
    """The device of the innermost scope; ``"auto"`` outside of any."""
    scopes = _scopes.get()
    return scopes[-1] if scopes else "auto"


def resolved(wanted: str, found: Collection[str]) -> str | None:
    """The device that a replica computes on.

    Parameters
    ----------
    wanted : str
        As a job has it.
    found : collection of str
        What its worker has: ``"cpu"``, ``"cuda:0"``, ...

    Returns
    -------
    str or None
        One of ``found``, or ``"cpu"``; None if the worker has no such device.
    """
    if wanted == "cpu":
        return wanted
    if wanted == "auto":
        return "cuda:0" if "cuda:0" in found else "cpu"
    name = f"cuda:{number_of(wanted)}"
    return name if name in found else None


def lacking(wanted: str, workers: Iterable[tuple[str, Collection[str], str]]) -> SpecError:
    """The error where no worker has the device of a job.

    ``workers``: of each its name, what it has, and why it has no GPU, in words.
    """
    told = [
        f"{name} has {' and '.join(sorted(found))}" + (f" ({why})" if why else "")
        for name, found, why in workers
    ]
    rest = f"; and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
    return SpecError(
        f"device: found {wanted!r}, expected a worker that has it, but "
        f"{'; '.join(told[:_TOLD])}{rest}"
    )
