"""A trained model on disk: safetensors for the parameters, JSON for the rest; never a pickle.

A saved model is a directory with ``params.safetensors`` and ``model.json``.  It is written under
another name beside its place, synced, and renamed, so that it is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtrain._version import __version__
from dtrain.errors import ModelFileError, SpecError, StorageError
from dtrain.frames import Columns
from dtrain.metrics import is_known
from dtrain.runtime.files import sync, write

FORMAT = 1
_PARAMS, _MANIFEST = "params.safetensors", "model.json"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a saved model is made of."""

    params: Mapping[str, np.ndarray]
    model: Any
    classes: np.ndarray | None
    classification: bool
    version: int
    metrics: tuple[str, ...] = ()
    history: tuple[dict[str, Any], ...] = ()
    columns: Columns | None = None


def save(path: str | os.PathLike[str], saved: Saved) -> Path:
    """Write a model to the directory ``path``, replacing a saved model that is there.

    Raises SpecError if something else is there; OSError if it cannot be written.
    """
    from safetensors.numpy import save as encode

    target = Path(path).absolute()
    check_target(target)
    tensors = {name: np.ascontiguousarray(value) for name, value in saved.params.items()}
    payload = encode(tensors)
    manifest = {
        "format": FORMAT,
        "dtrain": __version__,
        "model": describe_model(saved.model),
        "classification": saved.classification,
        "classes": None if saved.classes is None else _plain(saved.classes),
        "version": saved.version,
        "columns": None if saved.columns is None else saved.columns.to_dict(),
        # A function of a user's own cannot be stored.
        "metrics": [name for name in saved.metrics if is_known(name)],
        "history": list(saved.history),
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    fresh.mkdir(mode=0o700)
    try:
        write(fresh / _PARAMS, payload)
        write(fresh / _MANIFEST, json.dumps(manifest, indent=2).encode())
        sync(fresh)
        _swap(fresh, target)
        sync(target.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise SpecError unless ``path`` is free, empty, or a saved model that may be replaced."""
    target = Path(path)
    if not target.exists():
        return
    if not target.is_dir():
        raise SpecError(f"output {target}: found a file, expected a directory or nothing")
    names = {entry.name for entry in target.iterdir()}
    if names and not names <= {_PARAMS, _MANIFEST}:
        other = sorted(names - {_PARAMS, _MANIFEST})[0]
        raise SpecError(
            f"output {target}: found {other!r} in it, expected a saved model or nothing"
        )


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise StorageError unless a model can be written to ``path`` from here; before training."""
    target = Path(path).absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent):
            pass
    except OSError as error:
        raise StorageError(f"output {target}: cannot be written: {error}") from None


def load(path: str | os.PathLike[str], model: Any = None) -> Saved:
    """Read a saved model; ``model`` where it cannot be rebuilt from its class and config."""
    from safetensors import SafetensorError
    from safetensors.numpy import load as decode

    source = Path(path)
    try:
        manifest = json.loads((source / _MANIFEST).read_bytes())
        payload = (source / _PARAMS).read_bytes()
    except FileNotFoundError as error:
        raise ModelFileError(
            f"{source}: no saved model there ({error.filename} is missing)"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{source}: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise ModelFileError(f"{source / _MANIFEST}: found format {found}, expected {FORMAT}")
    digest = hashlib.sha256(payload).hexdigest()
    if digest != manifest.get("sha256"):
        raise ModelFileError(
            f"{source / _PARAMS}: found sha256 {digest[:12]}..., "
            f"expected {str(manifest.get('sha256'))[:12]}...: the file is damaged"
        )
    try:
        params = decode(payload)
        classes, columns = manifest["classes"], manifest.get("columns")
        return Saved(
            params=params,
            model=model if model is not None else _rebuild(source, manifest["model"]),
            classes=None if classes is None else np.array(classes),
            classification=bool(manifest["classification"]),
            version=int(manifest["version"]),
            metrics=tuple(manifest["metrics"]),
            columns=None if columns is None else Columns.from_dict(columns),
            history=tuple(manifest["history"]),
        )
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        if isinstance(error, SpecError):
            raise
        raise ModelFileError(f"{source}: {type(error).__name__}: {error}") from None


def describe_model(model: Any) -> dict[str, Any] | None:
    """The import path and config that a model is rebuilt from; None if it has no such."""
    config = getattr(model, "config", None)
    if not callable(config):
        return None
    kind = type(model)
    values = config()
    try:
        json.dumps(values)
    except (TypeError, ValueError):
        return None
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "config": values}


def _rebuild(source: Path, described: dict[str, Any] | None) -> Any:
    if described is None:
        raise SpecError(f"{source}: its model has no config(); pass one: load(path, model=...)")
    module, _, name = described["class"].partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
        return kind(**described["config"])
    except Exception as error:
        raise SpecError(
            f"{source}: cannot rebuild its model {described['class']} "
            f"({type(error).__name__}: {error}); pass one: load(path, model=...)"
        ) from error


def _plain(classes: np.ndarray) -> list[Any]:
    return [value.item() if isinstance(value, np.generic) else value for value in classes]


def _swap(fresh: Path, target: Path) -> None:
    """Put ``fresh`` in the place of ``target``; whatever was there goes only after that."""
    if not target.exists():
        os.rename(fresh, target)
        return
    old = target.parent / f".{target.name}.{uuid.uuid4().hex}.old"
    os.rename(target, old)
    try:
        os.rename(fresh, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old)
