"""What the manifest of a checkpoint says: which rows of which variable are in which file.

A manifest is a JSON object whose last field is the sha256 of its text without that field.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.layout import Layout, Variable

FORMAT = 1

#: A manifest may name no other file: what it says never becomes a path unchecked.
_PART = re.compile(r"part-[0-9]{5,}(-[0-9a-f]{8})?\.safetensors")


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` of a variable, or of a slot of it; None is its value."""

    slot: str | None
    variable: str
    start: int
    stop: int

    @property
    def key(self) -> str:
        """Its name in a part; no slot has a colon in its own."""
        kind = "param" if self.slot is None else f"slot:{self.slot}"
        return f"{kind}:{self.variable}"


@dataclass(frozen=True)
class Part:
    file: str
    nbytes: int
    sha256: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    values: Mapping[str, Any]
    layout: Layout
    parts: tuple[Part, ...]
    nbytes: int  # of all files


def seal(text: bytes) -> bytes:
    """A JSON object with one more field, the last: the hash of its text without that field."""
    return text[:-1] + b',"sha256":"%s"}' % hashlib.sha256(text).hexdigest().encode()


def unsealed(raw: bytes) -> dict[str, Any]:
    """The manifest that was sealed, if not a bit of it is different."""
    text = raw[: len(raw) - len(seal(b"}"))] + b"}"
    if seal(text) != raw:
        raise ValueError("its own sha256 is not that of its text: it is damaged")
    values: dict[str, Any] = json.loads(text)
    return values


def to_dict(part: Part) -> dict[str, Any]:
    tensors = [
        {"slot": p.slot, "variable": p.variable, "rows": [p.start, p.stop]} for p in part.pieces
    ]
    return {"file": part.file, "bytes": part.nbytes, "sha256": part.sha256, "tensors": tensors}


def from_dict(values: Mapping[str, Any]) -> Part:
    if not _PART.fullmatch(values["file"]):
        raise ValueError(f"found the file {values['file']!r}, expected a part")
    pieces = tuple(Piece(t["slot"], t["variable"], *t["rows"]) for t in values["tensors"])
    return Part(values["file"], values["bytes"], values["sha256"], pieces)


def misfit(layout: Layout, slots: Iterable[str], pieces: Iterable[Piece]) -> str | None:
    """Unless each row of each variable and slot is there exactly once: what is wrong."""
    ends = {(slot, v.name): count(v) for slot in (None, *slots) for v in layout.variables}
    at = dict.fromkeys(ends, 0)
    for piece in sorted(pieces, key=lambda p: p.start):
        own = (piece.slot, piece.variable)
        if own not in ends:
            return f"found {piece.key!r}, which is not in the layout"
        if piece.start != at[own] or piece.stop <= piece.start:
            return f"{piece.key!r}: found row {piece.start}, expected {at[own]}"
        at[own] = piece.stop
    for own, end in ends.items():
        if at[own] != end:
            return f"{Piece(*own, 0, end).key!r}: found {at[own]} rows, expected {end}"
    return None


def job_of(values: Mapping[str, Any]) -> str:
    return str(values["about"].get("job", ""))


def count(variable: Variable) -> int:
    """How many rows a variable has; a number is one row."""
    return variable.shape[0] if variable.shape else 1


def rows_of(
    layout: Layout, params: np.ndarray, slots: Mapping[str, np.ndarray]
) -> dict[tuple[str | None, str], np.ndarray]:
    """(slot or None, variable) -> its view, with the rows as the first axis."""
    return {
        (slot, name): view.reshape(view.shape or (1,))
        for slot, buffer in [(None, params), *slots.items()]
        for name, view in layout.views(buffer).items()
    }
