"""The checkpoints in a directory or at a URL: which there are, and whether they are whole.

A job writes them (``checkpoint=dtrain.Checkpoint(...)``) and goes on from the newest
(``resume=True``); here they are only looked at.
"""

from __future__ import annotations

import os
from typing import Any

from dtrain.runtime import checkpoint


def find(where: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The checkpoints there, newest first, by their manifests alone.

    Returns
    -------
    list of dict
        ``name, step, saved`` (seconds since 1970)``, nbytes, job, problem``: what is wrong with
        it, in words, or None.
    """
    return _entries(where, verify=False)


def verify(where: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Likewise, with every file read and held against its checksum; nothing is changed."""
    return _entries(where, verify=True)


def _entries(where: str | os.PathLike[str], *, verify: bool) -> list[dict[str, Any]]:
    place = os.fspath(where)
    place = place if "://" in place else os.path.abspath(place)
    fields = ("name", "step", "saved", "nbytes", "job", "problem")
    found = checkpoint.entries(place, verify=verify)
    return [{name: getattr(entry, name) for name in fields} for entry in found]
