"""What a process of this machine does, as a neighbour sees it.

A worker that is not heard of may have been stopped, may be gone, or may only be slow: user code
that holds the GIL keeps its process from answering anything.  The kernel knows which.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.machines.membership import Finding
from dtrain.runtime.transport.segment import machine

#: The states of a process in ``/proc/PID/stat``: stopped by a signal, or by a tracer; dead.
_STOPPED, _GONE = "Tt", "ZXx"


def identity() -> dict[str, Any]:
    """What others of this machine know this process by; survives the reuse of its number."""
    found = _stat(os.getpid())
    return {
        "machine": machine().hex() + _namespace(),
        "pid": os.getpid(),
        "began": found[1] if found else None,
    }


def same_machine(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether two processes see each other; not if one of them does not say where it is."""
    if not one or not other or not one["began"] or not other["began"]:
        return False
    return bool(one["machine"] == other["machine"])


def on_machine(known: Mapping[str, Any], machine: bytes) -> bool:
    """Whether a process is on the machine that calls itself so."""
    return str(known["machine"]).startswith(machine.hex())


def look(known: Mapping[str, Any]) -> Finding:
    """What the process does that says it is ``known``."""
    if not same_machine(known, identity()):
        return Finding.UNKNOWN
    found = _stat(int(known["pid"]))
    if found is None or found[1] != known["began"] or found[0] in _GONE:
        return Finding.GONE
    return Finding.STOPPED if found[0] in _STOPPED else Finding.RUNS


def _namespace() -> str:
    """Containers of one machine do not see each other's processes."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str] | None:
    """The state of a process, and when it began, in ticks since the start of the machine."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program is in parentheses, and may have any character in it.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
