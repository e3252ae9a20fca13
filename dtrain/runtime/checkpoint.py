"""Checkpoints of a job: safetensors by global row range, and a manifest; never a pickle.

A checkpoint is a directory ``step-00000012`` with a part for each shard and ``manifest.json``.
A part holds whole rows of variables: ``param:NAME`` and ``slot:SLOT:NAME``.  The manifest tells
which rows, so that a job goes on with any number of shards, and the size and sha256 of each part;
its last field is the sha256 of itself without that field.  How a checkpoint gets to its place
whole or not at all: see :mod:`dtrain.runtime.files`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from dtrain._version import __version__
from dtrain.errors import CheckpointError, StorageError
from dtrain.layout import Layout
from dtrain.partition import ShardPlan
from dtrain.partition import rows_of as rows_in
from dtrain.runtime.files import MANIFEST, NAME, Place, place
from dtrain.runtime.manifest import (
    FORMAT,
    Manifest,
    Part,
    Piece,
    from_dict,
    job_of,
    misfit,
    rows_of,
    seal,
    to_dict,
    unsealed,
)

logger = logging.getLogger("dtrain.checkpoint")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that a job is at one step.

    Attributes
    ----------
    step : int
        From 0 up.
    layout : Layout
    params : ndarray of uint8, shape (layout.nbytes,)
        The flat buffer of the parameters.
    slots : mapping of str to ndarray of uint8, shape (layout.nbytes,)
        The optimizer's slots, each in a buffer of the same layout.
    shards : ShardPlan
        How the files are cut.
    state, about : mapping
        What changes from step to step (cursor, seed, totals, history), and what does not
        (``job``, its id; spec, model, data).  Of what JSON can hold; NaN and infinity are kept,
        tuples come back as lists and the keys of dicts as strings.
    """

    step: int
    layout: Layout
    params: np.ndarray
    slots: Mapping[str, np.ndarray]
    shards: ShardPlan
    state: Mapping[str, Any]
    about: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A checkpoint that is there; ``problem`` says in words what is wrong with it, if anything.

    ``saved`` is in Unix seconds, ``nbytes`` is of all its files.
    """

    where: str
    name: str
    step: int
    saved: float = 0.0
    nbytes: int = 0
    job: str = ""
    problem: str | None = None


class _Damaged(CheckpointError):
    """It will never verify: not just out of reach for now, nor of another version."""


# -- writing -----------------------------------------------------------------------------------


def save(
    where: str, snapshot: Snapshot, *, keep: int, fence: Callable[[], None] = lambda: None
) -> Entry:
    """Write a checkpoint, then remove all but the newest ``keep``.

    If a checkpoint of that step is there and verifies, it stays and nothing is written: a job is
    deterministic.  Must not run in two threads for one place.

    Parameters
    ----------
    where : str
        An absolute path, or a URL that fsspec knows.
    keep : int
        From 1 up; as many that were set aside are kept, too.  To count, an old one needs a sound
        manifest and files of the right size; its hashes are left to :func:`latest`.
    fence : callable
        Called right before the checkpoint appears; raises if another writer has taken over, and
        then nothing appears.

    Raises
    ------
    StorageError
        Names the place and the reason; older checkpoints stay.
    ValueError
        If the snapshot does not fit together, or ``keep`` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep: found {keep}, expected 1 or more")
    pieces = _pieces_of(snapshot)
    name = _name(snapshot.step)
    there = place(where)
    try:
        old = _look(there, where, name, deep=True)[0] if name in there.names() else None

        def make_way() -> None:
            fence()
            if old is not None:
                _set_aside(there, old)

        if old is not None and old.problem is None:
            fence()
            entry = old
            if entry.job != job_of(vars(snapshot)):
                logger.warning("checkpoint %s in %s is of job %r; it stays", name, where, entry.job)
        else:
            entry = _write(there, where, snapshot, pieces, make_way)
    except OSError as error:
        raise StorageError(f"checkpoint {name} in {where}: {error}") from error
    _prune(there, where, name, keep)
    return entry


def check_writable(where: str) -> None:
    """Raise StorageError unless checkpoints can be written to ``where`` from here."""
    there = place(where)
    try:
        with there.draft(_name(0)):
            there.put(f"probe{there.tag}", b"x")
    except OSError as error:
        raise StorageError(f"checkpoints in {where}: cannot be written: {error}") from error


def _write(
    there: Place,
    where: str,
    snapshot: Snapshot,
    pieces: list[tuple[Piece, ...]],
    before: Callable[[], None],
) -> Entry:
    from safetensors.numpy import save as encode

    name, saved, layout = _name(snapshot.step), time.time(), snapshot.layout
    rows = rows_of(layout, snapshot.params, snapshot.slots)
    parts = []
    with there.draft(name):
        for index, own in enumerate(pieces):
            file = f"part-{index:05d}{there.tag}.safetensors"
            # One part at a time is in memory besides the snapshot.
            payload = encode({p.key: rows[p.slot, p.variable][p.start : p.stop] for p in own})
            parts.append(Part(file, len(payload), hashlib.sha256(payload).hexdigest(), own))
            there.put(file, payload)
            del payload
        manifest = {
            "format": FORMAT,
            "dtrain": __version__,
            "step": snapshot.step,
            "saved": saved,
            "layout": layout.to_dict(),
            "dtypes": [segment.dtype for segment in layout.segments],
            "slots": list(snapshot.slots),
            **snapshot.shards.to_dict(),
            "parts": [to_dict(part) for part in parts],
            "state": snapshot.state,
            "about": snapshot.about,
        }
        raw = seal(json.dumps(manifest, separators=(",", ":")).encode())
        there.commit(raw, before)
    return Entry(
        where=where,
        name=name,
        step=snapshot.step,
        saved=saved,
        nbytes=len(raw) + sum(part.nbytes for part in parts),
        job=job_of(manifest),
    )


def _prune(there: Place, where: str, name: str, keep: int) -> None:
    """Remove what is too old; a failure is no failure of the save, which is done."""
    try:
        for entry in list(_sound(there, where, deep=False))[keep:]:
            if entry.name != name:
                there.remove(entry.name)
        aside = [other for other in _newest_first(there) if _is_aside(other)]
        for other in aside[keep:]:
            there.remove(other)
        there.sweep()
    except OSError as error:
        logger.warning("checkpoints in %s: old ones could not be removed: %s", where, error)


def _pieces_of(snapshot: Snapshot) -> list[tuple[Piece, ...]]:
    """What stands in each part; ValueError if the snapshot does not fit together."""
    layout, slots = snapshot.layout, snapshot.slots
    if snapshot.step < 0:
        raise ValueError(f"step: found {snapshot.step}, expected 0 or more")
    if bad := [slot for slot in slots if ":" in slot]:
        raise ValueError(f"slots: found {bad[0]!r}, expected a name without a colon")
    for what, buffer in {"params": snapshot.params, **slots}.items():
        if buffer.dtype != np.uint8 or buffer.shape != (layout.nbytes,):
            raise ValueError(
                f"{what}: found {buffer.dtype} of shape {buffer.shape}, "
                f"expected uint8 of shape ({layout.nbytes},)"
            )
    pieces = [
        tuple(
            Piece(slot, variable, start, stop)
            for slot in (None, *slots)
            for variable, start, stop in rows_in(layout, shard)
        )
        for shard in snapshot.shards.shards
    ]
    if problem := misfit(layout, slots, chain(*pieces)):
        raise ValueError(f"shards: {problem}")
    return pieces


# -- reading -----------------------------------------------------------------------------------


def latest(where: str) -> Entry | None:
    """The newest checkpoint that verifies; None if there is none.

    Damaged ones that are newer are set aside, with a warning in the log.

    Raises
    ------
    CheckpointError
        If one can't be read for now, or is of another format: whether it is the one can't be told.
    """
    try:
        return next(_sound(place(where), where, deep=True), None)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"checkpoints in {where}: {error}") from error


def entries(where: str, *, verify: bool) -> list[Entry]:
    """All checkpoints, newest first, also those damaged or set aside; changes nothing.

    With ``verify`` every byte is read; else only manifests, and the files' sizes.  Raises
    CheckpointError if the place itself can't be read.
    """
    try:
        there = place(where)
        names = _newest_first(there)
    except OSError as error:
        raise CheckpointError(f"checkpoints in {where}: {error}") from error
    return [_look(there, where, name, deep=verify)[0] for name in names]


def about(entry: Entry) -> dict[str, Any]:
    """What does not change from step to step, by the manifest alone."""
    found: dict[str, Any] = _manifest(place(entry.where), entry.where, entry.name).values["about"]
    return found


def load(entry: Entry, *, fill: Mapping[str, float] | None = None) -> Snapshot:
    """Read a checkpoint; all of it is verified meanwhile.

    Parameters
    ----------
    entry : Entry
    fill : mapping of str to float
        What the optimizer's slots are before the first step (``Optimizer.initial``).  Files hold
        no padding: in the slots it gets this value, which it has kept in training, and else 0.

    Raises
    ------
    CheckpointError
        If it is damaged, or its slots are not those of ``fill``.
    """
    there = place(entry.where)
    manifest = _manifest(there, entry.where, entry.name)
    names = manifest.values["slots"]
    if fill is not None and set(fill) != set(names):
        raise CheckpointError(
            f"{entry.where}/{entry.name}: found the slots {sorted(names)}, expected {sorted(fill)}"
        )
    layout = manifest.layout
    params, *others = (np.zeros(layout.nbytes, np.uint8) for _ in range(1 + len(names)))
    slots = dict(zip(names, others, strict=True))
    for slot, value in (fill or {}).items():
        for segment in layout.segments:
            slots[slot][segment.start : segment.stop].view(segment.dtype).fill(value)
    rows = rows_of(layout, params, slots)
    for part in manifest.parts:
        _load_part(there, entry, part, rows)
    return Snapshot(
        params=params,
        slots=slots,
        layout=layout,
        shards=ShardPlan.from_dict(manifest.values),
        **{name: manifest.values[name] for name in ("step", "state", "about")},
    )


def _load_part(
    there: Place, entry: Entry, part: Part, rows: dict[tuple[str | None, str], np.ndarray]
) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import load as decode

    with _reading(there, entry.where, entry.name, part.file):
        payload = there.read(entry.name, part.file)
        _compare(part, len(payload), hashlib.sha256(payload).hexdigest())
        try:
            tensors = decode(payload)
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        for piece in part.pieces:
            target, found = rows[piece.slot, piece.variable], tensors.get(piece.key)
            target = target[piece.start : piece.stop]
            if found is None or (found.dtype, found.shape) != (target.dtype, target.shape):
                raise ValueError(f"{piece.key!r} is missing, or not as the manifest says")
            target[...] = found


def _sound(there: Place, where: str, *, deep: bool) -> Iterator[Entry]:
    """The checkpoints that verify, newest first; damaged ones on the way are set aside."""
    for name in _newest_first(there):
        if _is_aside(name):
            continue
        entry, error = _look(there, where, name, deep=deep)
        if isinstance(error, _Damaged):
            try:
                _set_aside(there, entry)
            except OSError as refusal:
                logger.warning("checkpoint %s stays where it is: %s", name, refusal)
        elif error is not None:
            raise error
        else:
            yield entry


def _set_aside(there: Place, entry: Entry) -> None:
    logger.warning("checkpoint %s is set aside: %s", entry.name, entry.problem)
    with suppress(FileNotFoundError):  # whoever writes there has removed it meanwhile
        there.set_aside(entry.name)


def _look(
    there: Place, where: str, name: str, *, deep: bool
) -> tuple[Entry, CheckpointError | None]:
    """What is there under a name, and what is wrong with it."""
    manifest, error = None, None
    try:
        manifest = _manifest(there, where, name)
        for part in manifest.parts:
            _check(there, where, name, part, deep=deep)
    except CheckpointError as found:
        error = found
    problem = None if error is None else str(error)
    if _is_aside(name):
        problem = f"set aside; {problem or 'it did not verify'}"
    entry = Entry(where=where, name=name, step=_order(name)[0], problem=problem)
    if manifest is not None:
        saved, job = float(manifest.values["saved"]), job_of(manifest.values)
        entry = replace(entry, saved=saved, nbytes=manifest.nbytes, job=job)
    return entry, error


def _check(there: Place, where: str, name: str, part: Part, *, deep: bool) -> None:
    with _reading(there, where, name, part.file):
        _compare(part, there.size(name, part.file))
        if deep:
            _compare(part, part.nbytes, there.sha256(name, part.file))


def _compare(part: Part, nbytes: int, digest: str | None = None) -> None:
    if nbytes != part.nbytes:
        raise ValueError(f"found {nbytes} bytes, expected {part.nbytes}: it is damaged")
    if digest is not None and digest != part.sha256:
        raise ValueError(f"found sha256 {digest[:12]}..., expected {part.sha256[:12]}...: damaged")


@contextmanager
def _reading(there: Place, where: str, name: str, file: str) -> Iterator[None]:
    """What goes wrong with a file, as a CheckpointError that names it."""
    path = f"{where.rstrip('/')}/{name}/{file}"
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        kind = _Damaged if there.is_lost(error) else CheckpointError
        raise kind(f"{path}: {type(error).__name__}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise _Damaged(f"{path}: {error}") from error


# -- the manifest ------------------------------------------------------------------------------


def _manifest(there: Place, where: str, name: str) -> Manifest:
    with _reading(there, where, name, MANIFEST):
        raw = there.read(name, MANIFEST)
        values = unsealed(raw)
        if values["format"] != FORMAT:
            raise CheckpointError(
                f"{where}/{name}: found format {values['format']} of dtrain {values['dtrain']}, "
                f"expected {FORMAT}"
            )
        if values["step"] != _order(name)[0]:
            raise ValueError(f"found step {values['step']}, expected that of its directory")
        layout = Layout.from_dict(values["layout"])
        parts = tuple(from_dict(part) for part in values["parts"])
        if problem := misfit(layout, values["slots"], chain(*(part.pieces for part in parts))):
            raise ValueError(problem)
        return Manifest(values, layout, parts, len(raw) + sum(part.nbytes for part in parts))


# -- names -------------------------------------------------------------------------------------


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _is_aside(name: str) -> bool:
    return ".corrupt" in name


def _order(name: str) -> tuple[int, bool, int]:
    """(step, whether it is not set aside, how often the step was before): newest last."""
    match = NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"found the name {name!r}, expected step-<number>")
    return int(match[1]), match[2] is None, int(match[3] or 0)


def _newest_first(there: Place) -> list[str]:
    return sorted(there.names(), key=_order, reverse=True)
