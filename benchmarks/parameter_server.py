"""TensorFlow's ParameterServerStrategy, in a virtual environment of its own.

Its coordinator is the program :mod:`benchmarks.parameter_server_tf`, which starts two workers and
one server; orders and answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.processes import DEADLINE
from benchmarks.report import Turn
from benchmarks.workloads import Workload

#: Seconds that they have to end by themselves.
_LEAVE = 10.0


class Missing(Exception):
    """There is no TensorFlow; says where."""


class ParameterServer:
    """Asynchronous, two workers and one server, for a ``with`` block.

    Parameters
    ----------
    python : str
        The program to run.

    Raises
    ------
    Missing
        If it cannot import TensorFlow.
    """

    name = "tf"

    def __init__(self, python: str) -> None:
        asked = [python, "-c", "import tensorflow"]
        if subprocess.run(asked, capture_output=True, timeout=DEADLINE).returncode:
            raise Missing(f"{python} cannot import it")
        self._folder = tempfile.TemporaryDirectory(prefix="dtrain-benchmarks-tf-")
        self._known: Workload | None = None
        self._said = Path(self._folder.name) / "stderr"
        with self._said.open("wb") as stderr:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.parameter_server_tf"],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
                # A group of its own, which :meth:`close` ends as a whole.
                start_new_session=True,
            )
        try:
            self.about: dict[str, Any] = self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def pids(self) -> list[int]:
        return [self._process.pid, *self.about["servers"]]

    def turn(self, workload: Workload, seconds: float) -> Turn:
        """Samples/s of the two workers together."""
        order: dict[str, Any] = {"seconds": seconds}
        if workload != self._known:
            order["workload"] = {
                "widths": workload.widths,
                "batch": workload.batch,
                "seed": workload.seed,
                "rows": self._rows(workload),
            }
            self._known = workload
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
        answer = self._answer(seconds)
        # Steps of one scheduled function, for each model
        self.about.setdefault("packed", {})[workload.name] = answer["packed"]
        return Turn(answer["rate"], [answer["rate"]])

    def _rows(self, workload: Workload) -> dict[str, str]:
        """The files with the rows, which the workers read themselves."""
        found = {}
        for name, array in zip("xy", workload.data(), strict=True):
            path = Path(self._folder.name) / name
            np.ascontiguousarray(array).tofile(path)
            found[name] = str(path)
        return found

    def _answer(self, seconds: float = 0.0) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], DEADLINE + seconds)[0]:
            raise RuntimeError(f"tf has not answered in {DEADLINE:.0f} s; {self._tail()}")
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"tf died; {self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tail(self) -> str:
        return f"it said: {self._said.read_text(errors='replace')[-2000:]}"

    def close(self) -> None:
        """End the coordinator, its workers and its server."""
        process = self._process
        servers = []
        for pid in getattr(self, "about", {}).get("servers", ()):
            with suppress(psutil.NoSuchProcess):
                servers.append(psutil.Process(pid))
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVE)
        # What is left of the group, if anything; its number is not given anew while it lives.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        psutil.wait_procs(servers, _LEAVE)
        process.stdout.close()
        self._folder.cleanup()
