"""Directories of files that are there whole or not at all, on a disk or at any URL of fsspec.

Such a directory, a *bundle*, has a manifest, the file that is written last.  On a disk a bundle is
written under a hidden name beside its place, synced, and renamed.  An object store can't rename:
there a bundle is what has a manifest, and all else in its folder is the rest of a dead writer.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from dtrain.errors import StorageError

MANIFEST = "manifest.json"

#: The name of a bundle: its number; ``.corrupt`` if it is set aside, numbered if that was taken.
NAME = re.compile(r"step-([0-9]{8,})(\.corrupt(?:-([0-9]+))?)?")

#: Seconds after which the unfinished bundle of another process is taken for a dead writer's.
STALE = 3600.0

_PROCESS = uuid.uuid4().hex[:8]  # a process id alone may be another host's as well
_HIDDEN = re.compile(r"\.step-.+\.([0-9]+-[0-9a-f]{8})\.[0-9a-f]{8}\.tmp")
_live: set[str] = set()  # the hidden names that threads of this process write to right now


def _step(operation: str, path: object) -> None:
    """Called before each operation: tests raise here, or end the process."""


def write(path: Path, payload: bytes) -> None:
    """Make a file that is for its owner alone, and on the disk when this returns."""
    _step("write", path)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(payload)
        file.flush()
        _step("sync", path)
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """Bring the names in a directory to the disk."""
    _step("sync", directory)
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Local:
    """Bundles in a directory of a disk.  One instance writes one bundle at most."""

    #: What the names of files bear, so that two writers of one bundle never share a file.
    tag = ""

    def __init__(self, root: str) -> None:
        self._root = Path(root)
        self._name = ""

    def names(self) -> list[str]:
        """All bundles, and those set aside; in no order."""
        with suppress(FileNotFoundError):
            return [e.name for e in os.scandir(self._root) if NAME.fullmatch(e.name) and e.is_dir()]
        return []

    def read(self, name: str, file: str) -> bytes:
        return (self._root / name / file).read_bytes()

    def sha256(self, name: str, file: str) -> str:
        """The hash of a file, without all of it in memory."""
        with open(self._root / name / file, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    def size(self, name: str, file: str) -> int:
        return os.stat(self._root / name / file).st_size

    def is_lost(self, error: OSError) -> bool:
        """Whether a file is missing or beyond reading; else it may be readable another time."""
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)

    @contextmanager
    def draft(self, name: str) -> Iterator[None]:
        """Begin a bundle; it is removed at the end of the block unless it was committed."""
        _make(self._root)
        self._name, self._draft = name, self._root / _hidden(name)
        _live.add(self._draft.name)
        try:
            _step("mkdir", self._draft)
            self._draft.mkdir(mode=0o700)
            yield
        finally:
            with suppress(OSError):  # a later sweep has another try
                if self._draft.exists():
                    _remove(self._draft)
            _live.discard(self._draft.name)

    def put(self, file: str, payload: bytes) -> None:
        """Write a file of the bundle begun."""
        write(self._draft / file, payload)

    def commit(self, manifest: bytes, before: Callable[[], None]) -> None:
        """Put the bundle in its place; ``before`` is called when all is ready, and may raise."""
        self.put(MANIFEST, manifest)
        sync(self._draft)
        before()
        _step("rename", self._draft)
        os.rename(self._draft, self._root / self._name)
        sync(self._root)

    def set_aside(self, name: str) -> None:
        """Give a bundle a name that says that it is damaged."""
        aside = (f"{name}.corrupt" + (f"-{i}" if i else "") for i in count())
        free = next(other for other in aside if not os.path.lexists(self._root / other))
        _step("rename", self._root / name)
        os.rename(self._root / name, self._root / free)
        sync(self._root)

    def remove(self, name: str) -> None:
        """Remove a bundle; first its name, so that a half of it is never taken for a whole."""
        hidden = self._root / _hidden(name)
        _step("rename", self._root / name)
        os.rename(self._root / name, hidden)
        _remove(hidden)

    def sweep(self) -> None:
        """Remove what earlier writers, dead by now, have left."""
        for entry in list(os.scandir(self._root)):
            match = _HIDDEN.fullmatch(entry.name)
            if match is None or entry.name in _live:
                continue
            with suppress(FileNotFoundError):
                age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if match[1] == _owner() or age > STALE:
                    _remove(Path(entry.path))


class Remote:
    """Bundles at a URL, as :class:`Local`; what was set aside goes when it is written anew."""

    def __init__(self, fs: Any, root: str) -> None:
        self._fs, self._root = fs, root.rstrip("/")
        self.tag = f"-{uuid.uuid4().hex[:8]}"
        self._name = ""
        self._mine: list[str] = []
        self._is_committing = False

    def names(self) -> list[str]:
        found = []
        for folder, files in self._folders().items():
            if MANIFEST in files:
                found.append(folder)
            elif f"{MANIFEST}.corrupt" in files:
                found.append(f"{folder}.corrupt")
        return found

    def read(self, name: str, file: str) -> bytes:
        with _told():
            return bytes(self._fs.cat_file(self._path(name, file)))

    def sha256(self, name: str, file: str) -> str:
        with _told(), self._fs.open(self._path(name, file), "rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    def size(self, name: str, file: str) -> int:
        with _told():
            return int(self._fs.size(self._path(name, file)))

    def is_lost(self, error: OSError) -> bool:
        return isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError)

    @contextmanager
    def draft(self, name: str) -> Iterator[None]:
        self._name = name
        with _told():
            _step("mkdir", self._path(name))
            self._fs.makedirs(self._path(name), exist_ok=True)
        try:
            yield
        finally:
            # A manifest that failed may be there all the same: then its parts have to be as well.
            if not self._is_committing:
                with suppress(OSError):
                    self._delete(name, self._mine)

    def put(self, file: str, payload: bytes) -> None:
        with _told():
            path = self._path(self._name, file)
            self._mine.append(file)
            _step("put", path)
            self._fs.pipe_file(path, payload)

    def commit(self, manifest: bytes, before: Callable[[], None]) -> None:
        before()
        self._is_committing = True
        self.put(MANIFEST, manifest)

    def set_aside(self, name: str) -> None:
        path = self._path(name, MANIFEST)
        with _told():
            _step("put", f"{path}.corrupt")
            self._fs.pipe_file(f"{path}.corrupt", self._fs.cat_file(path))
            _step("delete", path)
            self._fs.rm_file(path)

    def remove(self, name: str) -> None:
        folder = name.partition(".corrupt")[0]
        with _told():
            path = self._path(name, MANIFEST)
            _step("delete", path)
            self._fs.rm_file(path)
        self._delete(folder, self._folders().get(folder, set()))

    def sweep(self) -> None:
        for folder, files in self._folders().items():
            if folder == self._name and self._is_committing:
                self._delete(folder, files - set(self._mine))
            elif not files & {MANIFEST, f"{MANIFEST}.corrupt"}:
                self._delete(folder, files)

    def _path(self, name: str, file: str = "") -> str:
        folder, corrupt, _ = name.partition(".corrupt")
        path = f"{self._root}/{folder}/{file}".rstrip("/")
        return f"{path}.corrupt" if corrupt and file == MANIFEST else path

    def _folders(self) -> dict[str, set[str]]:
        """Folder -> the names of its files."""
        with _told(), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            folders = [
                info["name"].rstrip("/").rpartition("/")[2]
                for info in self._fs.ls(self._root, detail=True)
                if info["type"] == "directory"
            ]
            return {
                folder: {p.rpartition("/")[2] for p in self._fs.ls(self._path(folder), False)}
                for folder in folders
                if (match := NAME.fullmatch(folder)) and not match[2]
            }
        return {}

    def _delete(self, folder: str, files: set[str] | list[str]) -> None:
        """Delete files one by one: fsspec would take ``rm`` of a path for a pattern."""
        for file in sorted(files):
            with suppress(FileNotFoundError), _told():
                _step("delete", f"{self._path(folder)}/{file}")
                self._fs.rm_file(f"{self._path(folder)}/{file}")
        with suppress(OSError), _told():  # most stores have no folders at all
            self._fs.rmdir(self._path(folder))


Place: TypeAlias = Local | Remote


def place(where: str) -> Place:
    """Where bundles are kept: an absolute path, or a URL that fsspec knows.

    Raises
    ------
    StorageError
        For a relative path, or a URL of a kind that is not installed here.
    """
    if "://" not in where:
        if not os.path.isabs(where):
            raise StorageError(f"{where}: found a relative path, expected an absolute one or a URL")
        return Local(where)
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from fsspec.implementations.local import (  # type: ignore[import-untyped]
        LocalFileSystem,
    )

    try:
        fs, root = url_to_fs(where)
    except Exception as error:
        raise StorageError(f"{where}: {type(error).__name__}: {error}") from error
    return Local(root) if isinstance(fs, LocalFileSystem) else Remote(fs, root)


@contextmanager
def _told() -> Iterator[None]:
    """The backends of fsspec have errors of their own; here each is an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _owner() -> str:
    return f"{os.getpid()}-{_PROCESS}"


def _hidden(name: str) -> str:
    return f".{name}.{_owner()}.{uuid.uuid4().hex[:8]}.tmp"


def _make(folder: Path) -> None:
    """Make a directory and those above it, and have their names on the disk."""
    if folder.is_dir():
        return
    _make(folder.parent)
    _step("mkdir", folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    sync(folder.parent)


def _remove(folder: Path) -> None:
    _step("remove", folder)
    shutil.rmtree(folder)
