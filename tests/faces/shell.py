"""A user at a terminal: commands in real processes, held to leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from distributed import Client

from tests.conftest import until

DTRAIN = str(Path(sysconfig.get_path("scripts")) / "dtrain")

#: Jobs compute on the CPU, also where there is a GPU.
_CPU = {"CUDA_VISIBLE_DEVICES": ""}

#: What decides where a command connects to, and how: never this machine's own.
_OURS = ("DTRAIN_", "DASK_", "PYTHONPATH", "PYTHONWARNINGS")


@dataclass(frozen=True)
class Ended:
    """What a command left on the terminal."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    def refused(self, code: int, *words: str) -> None:
        """It ended by one message on one line, with ``words`` in it, and said nothing else."""
        assert self.code == code, self
        assert self.out == "", self
        assert self.err.startswith("dtrain: "), self
        assert self.err.count("\n") == 1, self
        self.says(*words)

    def says(self, *words: str) -> None:
        assert [word for word in words if word not in self.err] == [], self


class Command:
    """A running command; a session of its own, as a terminal gives it."""

    def __init__(self, args: list[str], folder: Path, env: dict[str, str], stderr: int) -> None:
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            args, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True,
            start_new_session=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """The next line on stdout."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """SIGINT as Ctrl-C on a terminal sends it, to all of the group; others as ``kill`` does."""
        send = os.killpg if number == signal.SIGINT else os.kill
        send(self.pid, number)

    def end(self, seconds: float = 30.0) -> Ended:
        """Wait for its end, and for that of all processes that it started."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"still running after {seconds} s; {out=}, {err=}") from None
        ended = Ended(self.process.returncode, out, err or "", time.monotonic() - self._began)
        until(lambda: not members(self.pid), 20.0, f"processes are left of {self.process.args}")
        return ended

    def kill(self) -> None:
        """All of its processes, at once."""
        for member in [self.pid, *members(self.pid)]:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)


def members(session: int) -> set[int]:
    """The processes of a session that are alive."""
    found = set()
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


class Shell:
    """A folder to work in, with a folder for temporary files that is to be empty in the end."""

    def __init__(self, folder: Path, scheduler: str | None = None) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
        self.env |= {"TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1", "TERM": "xterm"}
        self.env |= _CPU
        if scheduler is not None:
            self.env["DTRAIN_SCHEDULER"] = scheduler

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return name

    def start(self, *args: str, stderr: int = subprocess.PIPE, **env: str) -> Command:
        return Command(list(args), self.folder, self.env | env, stderr)

    def run(self, *args: str, seconds: float = 30.0, **env: str) -> Ended:
        command = self.start(*args, **env)
        try:
            return command.end(seconds)
        finally:
            command.kill()

    def dtrain(self, *args: str, seconds: float = 30.0, **env: str) -> Ended:
        return self.run(DTRAIN, *args, seconds=seconds, **env)

    def left(self) -> list[str]:
        """The temporary files."""
        return sorted(os.listdir(self.temporary))


# -- clusters that somebody else has started ---------------------------------------------------

#: A machine without dtrain.
WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dtrain":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""

#: A machine with another version of it.
OTHER = """
import sys, types
version = sys.modules["dtrain._version"] = types.ModuleType("dtrain._version")
version.__version__ = "0.0.7"
"""


class Site:
    """A Dask cluster of ``dask scheduler`` and ``dask worker`` processes."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
        self._env |= {"TMPDIR": str(folder), **_CPU, **env}
        self._commands: list[subprocess.Popen[bytes]] = []
        self.address = ""

    def open(self, kind: str | None) -> None:
        file = self.folder / "scheduler.json"
        self._start(
            "scheduler", kind, "--host", "127.0.0.1", "--port", "0",
            "--dashboard-address", "127.0.0.1:0", "--no-dashboard", "--scheduler-file", str(file),
        )  # fmt: skip
        until(lambda: file.exists() and file.read_text(), 40.0, "no scheduler")
        self.address = str(json.loads(file.read_text())["address"])

    def _start(self, what: str, kind: str | None, *args: str) -> None:
        env = dict(self._env)
        if kind is not None:
            place = self.folder / f"site{len(self._commands)}"
            place.mkdir()
            (place / "sitecustomize.py").write_text(kind)
            env["PYTHONPATH"] = str(place)
        args = (sys.executable, "-m", f"distributed.cli.dask_{what}", *args)
        with (self.folder / f"{what}{len(self._commands)}.log").open("wb") as log:
            command = subprocess.Popen(
                args, cwd=self.folder, env=env, stdout=log, stderr=log, start_new_session=True
            )
        self._commands.append(command)

    def workers(self, *names: str, kind: str | None = None, nanny: bool = False) -> None:
        """Start workers of one thread; returns once they are in."""
        for name in names:
            self._start(
                "worker", kind, self.address, "--nthreads", "1", "--name", name, "--no-dashboard",
                "--host", "127.0.0.1", "--nanny" if nanny else "--no-nanny",
            )  # fmt: skip
        with Client(self.address, timeout=10, set_as_default=False) as client:
            client.wait_for_workers(len(self._commands) - 1, timeout=30)

    def kill_scheduler(self) -> None:
        self._commands[0].kill()

    def wait(self, seconds: float = 30.0) -> None:
        """Until all have ended by themselves: workers do, some time after their scheduler."""
        over = time.monotonic() + seconds
        for command in self._commands:
            command.wait(max(0.0, over - time.monotonic()))

    def close(self) -> None:
        """End them at once; what they have started ends with them, and cleans up."""
        for command in self._commands:
            command.kill()
            command.wait(10)
        for command in self._commands:
            pid = command.pid
            until(lambda pid=pid: not members(pid), 30.0, f"processes are left of {command.args}")


@contextmanager
def site(folder: Path, kind: str | None = None, **env: str) -> Iterator[Site]:
    found = Site(folder, **env)
    try:
        found.open(kind)
        yield found
    finally:
        found.close()
