"""The command line: exit codes, what goes to stdout, and what happens on Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed
import dtrain_cli.main as cli
import numpy as np
import pytest
from typer.testing import CliRunner

import dtrain
from dtrain import specfile
from dtrain.errors import ClusterError, DataError, DeadlineError, JobNotFound, SpecError

ADDRESS = "tcp://127.0.0.1:1"
SUBMIT_KEYS = {"id", "state", "reason", "message", "metrics", "history", "output"}
SCRIPT = "from dtrain_cli.main import run; run()"
#: What a subprocess needs to find this checkout, whether or not it is installed.
ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(str(Path(m.__file__).parents[1]) for m in (cli, specfile)),
}

DONE = {
    "id": "j1",
    "name": "a [red] name",
    "state": "SUCCEEDED",
    "reason": None,
    "message": None,
    "step": 40,
    "epoch": 2,
    "epochs": 2,
    "loss": np.float32(0.25),
    "samples_per_s": 1234.5,
    "replicas": 2,
    "shards": 1,
    "ledger": {},
    "history": [{"epoch": 1, "loss": float("nan")}, {"epoch": 2, "loss": 0.25}],
    "metrics": {"val_accuracy": 0.975},
    "output": "/models/a",
    "traceback": None,
}
FAILED = {
    **DONE,
    "state": "FAILED",
    "reason": "USER_ERROR",
    "message": "ValueError: no",
    "traceback": "Traceback (most recent call last):\n  remote line\nValueError: no\n",
    "output": None,
}


class FakeHandle:
    """A job whose waits do what the list says, one item each; then it is as ``status`` says."""

    id = "j1"

    def __init__(self, status: dict[str, Any], waits: list[Any] | None = None) -> None:
        self._status, self._waits, self.calls = status, waits or [], []

    @property
    def state(self) -> str:
        return self._status["state"]

    def status(self) -> dict[str, Any]:
        return self._status

    def wait(self, timeout: float | None = None, progress: bool | None = None) -> None:
        self.calls.append(("wait", timeout))
        print("a print of the user's code")
        if self._waits:
            step = self._waits.pop(0)
            if isinstance(step, BaseException):
                raise step
            step()

    def cancel(self) -> None:
        self.calls.append(("cancel", None))
        self._status = {**self._status, "state": "CANCELLED", "reason": "CANCELLED"}

    def why_waiting(self) -> str:
        return "2 of 4 workers are there"

    def events(self) -> list[dict[str, Any]]:
        return [{"time": 1.8e9, "state": "RUNNING", "message": "saved [step-00000012]"}]


class FakePlan:
    def to_dict(self) -> dict[str, Any]:
        return {"imbalance": 0.05}

    def __str__(self) -> str:
        return "WORKER  [red]"


class Api:
    """dtrain's API, faked; keeps what it was called with."""

    def __init__(self) -> None:
        self.handle = FakeHandle(DONE)
        self.job = SimpleNamespace(replicas=1)
        self.connected: list[tuple[str | None, int | None]] = []
        self.asked: list[str] = []
        self.submitted: list[bool] = []
        self.planned: list[dict[str, Any]] = []
        self.loaded: list[tuple[Any, ...]] = []
        self.closed = 0
        self.submit_error: Exception | None = None
        self.doctor_ok = True

    def load_job(self, path: Path, *, name: Any = None, output: Any = None) -> Any:
        self.loaded.append((path, name, output))
        if path.suffix != ".toml":
            raise SpecError(f"{path}: no TOML")
        return self.job

    @contextmanager
    def connect(self, address: str | None = None, *, workers: int | None = None) -> Any:
        self.connected.append((address, workers))
        if address == "tcp://nobody:1":
            raise ClusterError(f"nothing answers at {address}")
        yield "client"
        self.closed += 1

    def submit(self, job: Any, *, client: Any, detach: bool) -> FakeHandle:
        assert (job, client) == (self.job, "client")
        self.submitted.append(detach)
        if self.submit_error:
            raise self.submit_error
        return self.handle

    def plan(self, job: Any, **where: Any) -> Any:
        assert job == self.job
        self.planned.append(where)
        return FakePlan()

    def jobs(self, address: str) -> list[FakeHandle]:
        self.asked.append(address)
        if address == "tcp://nobody:1":
            raise ClusterError(f"nothing answers at {address}")
        return [self.handle] if self.handle else []

    def attach(self, job_id: str, address: str) -> FakeHandle:
        # An address, not a client: an attached job would live and die with that.
        assert isinstance(address, str)
        if job_id != "j1":
            raise JobNotFound(f"no job {job_id!r}")
        return self.handle

    def doctor(self, client: Any) -> dict[str, Any]:
        fine = {
            **dict.fromkeys(["python", "dtrain", "dask", "distributed", "numpy"], "1"),
            "where": "here",
            "ok": True,
            "problem": None,
        }
        bad = {**fine, "where": "there", "dtrain": None, "ok": False, "problem": "no dtrain"}
        fine_worker = {**fine, "blas": "openblas 0.3, 8 threads; 1 while training"}
        fine_worker |= {"devices": ["cpu"], "no_gpu": "CuPy finds none"}
        workers = [fine_worker] if self.doctor_ok else [fine_worker, bad]
        return {"client": fine, "scheduler": fine, "workers": workers}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    fake = Api()
    for name in ("connect", "submit", "jobs", "attach", "doctor", "load_job", "plan"):
        monkeypatch.setattr(dtrain, name, getattr(fake, name), raising=False)
    monkeypatch.delenv("DTRAIN_SCHEDULER", raising=False)
    return fake


def dt(*args: str, **options: Any) -> Any:
    return CliRunner().invoke(cli.app, list(args), **options)


def document(result: Any) -> dict[str, Any]:
    """The one object on stdout."""
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    assert isinstance(found, dict)
    return found


# --- submit.


def test_submit_waits_and_sums_up(api):
    result = dt("submit", "a.toml", "--name", "n", "--output", "o")
    assert result.exit_code == 0
    assert api.loaded == [(Path("a.toml"), "n", Path("o"))]
    assert api.connected == [(None, 1)]
    assert api.submitted == [False]
    assert api.closed == 1
    for text in ("a [red] name", "SUCCEEDED", "2 of 2", "0.975", "1234", "/models/a"):
        assert text in result.stdout
    assert "job j1 submitted" in result.stderr


def test_submit_json_is_alone_on_stdout(api):
    result = dt("submit", "a.toml", "--json")
    assert result.exit_code == 0
    found = document(result)
    assert set(found) == SUBMIT_KEYS
    assert found["history"][0]["loss"] is None  # NaN is no JSON
    assert found["metrics"] == {"val_accuracy": 0.975}
    assert "a print of the user's code" in result.stderr


def test_submit_that_fails_tells_why(api):
    api.handle = FakeHandle(FAILED)
    result = dt("submit", "a.toml")
    assert result.exit_code == 1
    assert "USER_ERROR" in result.stderr
    assert "remote line" in result.stderr
    result = dt("submit", "a.toml", "--json")
    assert result.exit_code == 1
    assert document(result)["state"] == "FAILED"
    assert document(result)["message"] == "ValueError: no"


def test_only_user_errors_show_a_traceback(api):
    api.handle = FakeHandle({**FAILED, "reason": "DATA_ERROR"})
    result = dt("submit", "a.toml")
    assert result.exit_code == 1
    assert "remote line" not in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError("too few rows"), 2),
        (DataError("too few rows"), 2),
        (ClusterError("no dtrain on tcp://w"), 3),
        (DeadlineError("waited for tcp://w"), 1),
    ],
)
def test_errors_before_the_start(api, error, code):
    api.submit_error = error
    result = dt("submit", "a.toml")
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr == f"dtrain: {error}\n"
    result = dt("submit", "a.toml", "--json")
    assert result.exit_code == code
    assert document(result) == {
        "id": None,
        "state": None,
        "reason": type(error).__name__,
        "message": str(error),
        "metrics": None,
        "history": [],
        "output": None,
    }


def test_a_bad_spec_starts_nothing(api):
    result = dt("submit", "a.txt", "--json")
    assert result.exit_code == 2
    assert api.connected == []
    assert document(result)["reason"] == "SpecError"


def test_a_cluster_lost_while_waiting_keeps_the_id(api):
    api.handle = FakeHandle({**DONE, "state": "RUNNING"}, [ClusterError("the scheduler is gone")])
    result = dt("submit", "a.toml", "--json", "--scheduler", ADDRESS)
    assert result.exit_code == 3
    assert document(result)["id"] == "j1"
    assert document(result)["reason"] == "ClusterError"


def test_a_defect_is_not_hidden(api):
    api.submit_error = ZeroDivisionError("ours")
    result = dt("submit", "a.toml", "--json")
    assert isinstance(result.exception, ZeroDivisionError)
    assert document(result)["reason"] == "ZeroDivisionError"


def test_detach_needs_a_cluster(api):
    result = dt("submit", "a.toml", "--detach")
    assert result.exit_code == 2
    assert "--scheduler" in result.stderr
    assert api.connected == []


def test_detach_returns_the_id(api):
    api.handle = FakeHandle({**DONE, "state": "QUEUED"})
    result = dt("submit", "a.toml", "--detach", "--scheduler", ADDRESS)
    assert result.exit_code == 0
    assert result.stdout == "j1\n"
    assert "dtrain status j1" in result.stderr
    assert (api.submitted, api.handle.calls) == ([True], [])
    result = dt("submit", "a.toml", "--detach", "--scheduler", ADDRESS, "--json")
    assert document(result)["state"] == "QUEUED"


@pytest.mark.parametrize(("replicas", "workers"), [(None, 2), (1, 1), (3, 3), (9, 4)])
def test_replicas_make_embedded_workers(api, monkeypatch, replicas, workers):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    api.job.replicas = replicas
    dt("submit", "a.toml")
    assert api.connected == [(None, workers)]


def test_a_plan_starts_nothing(api, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    api.job.replicas = 3
    result = dt("submit", "a.toml", "--plan")
    assert (result.exit_code, result.stdout) == (0, "WORKER  [red]\n")
    # No cluster is named: none is started, either.
    assert (api.planned, api.connected) == ([{"workers": 3}], [])
    result = dt("submit", "a.toml", "--plan", "--json", "--scheduler", ADDRESS)
    assert document(result) == {"imbalance": 0.05}
    assert (api.planned[1], api.connected) == ({"client": "client"}, [(ADDRESS, None)])
    assert api.submitted == []
    both = dt("submit", "a.toml", "--plan", "--detach", "--scheduler", ADDRESS)
    assert both.exit_code == 2
    assert "--plan and --detach: found both" in both.stderr


# --- Ctrl-C.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cancels(api, number):
    api.handle = FakeHandle({**DONE, "state": "RUNNING"}, [lambda: signal.raise_signal(number)])
    result = dt("submit", "a.toml", "--json")
    assert result.exit_code == 130
    assert [call for call, _ in api.handle.calls] == ["wait", "cancel", "wait"]
    assert api.handle.calls[-1][1] <= 5
    assert document(result)["state"] == "CANCELLED"
    assert api.closed == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_cancel_that_takes_long_is_not_waited_for(api):
    waits = [KeyboardInterrupt(), DeadlineError("still STOPPING")]
    api.handle = FakeHandle({**DONE, "state": "RUNNING"}, waits)
    assert dt("submit", "a.toml").exit_code == 130


def test_an_interrupt_before_the_job(api):
    api.submit_error = KeyboardInterrupt()  # type: ignore[assignment]
    result = dt("submit", "a.toml", "--json")
    assert result.exit_code == 130
    assert document(result)["reason"] == "Interrupted"


def test_a_second_interrupt_leaves_at_once(tmp_path):
    """In a process of its own, as it ends one; its job cannot be cancelled."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "sys.path.insert(0, sys.argv.pop(1))\n"
        "import test_cli as t\n"
        "fake = t.Api()\n"
        "def kill():\n"
        "    os.write(1, b'a print of a worker')\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "fake.handle = t.FakeHandle({**t.DONE, 'state': 'RUNNING'}, [kill, kill])\n"
        "for name in ('connect', 'submit', 'load_job'):\n"
        "    setattr(t.dtrain, name, getattr(fake, name))\n"
        "t.cli.run()\n"
    )
    command = [sys.executable, str(script), str(Path(__file__).parent), "submit", "a.toml"]
    result = subprocess.run(
        [*command, "--json"], env=ENV, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 130, result.stderr
    assert document(result)["id"] == "j1"
    assert result.stderr.count("a print of a worker") == 2


# --- The other verbs.


def test_the_address_is_option_then_variable_then_dask(api, monkeypatch):
    import dask

    with dask.config.set({"scheduler-address": "tcp://dask:1"}):
        dt("list")
        monkeypatch.setenv("DTRAIN_SCHEDULER", "tcp://variable:1")
        dt("list")
        dt("list", "--scheduler", "tcp://option:1")
    assert api.asked == ["tcp://dask:1", "tcp://variable:1", "tcp://option:1"]
    assert api.connected == []


@pytest.mark.parametrize(
    "args", [["list"], ["status", "j1"], ["why", "j1"], ["events", "j1"], ["cancel", "j1"]]
)
def test_verbs_need_a_cluster(api, args):
    result = dt(*args)
    assert result.exit_code == 3
    assert "--scheduler" in result.stderr
    result = dt(*args, "--json")
    assert result.exit_code == 3
    assert document(result)["error"]["type"] == "ClusterError"
    assert api.connected == []


def test_nobody_at_the_address(api):
    assert dt("list", "--scheduler", "tcp://nobody:1").exit_code == 3
    assert dt("submit", "a.toml", "--scheduler", "tcp://nobody:1").exit_code == 3


@pytest.mark.parametrize("verb", ["status", "why", "events", "cancel"])
def test_an_unknown_job(api, verb):
    result = dt(verb, "j2", "--scheduler", ADDRESS, "--json")
    assert result.exit_code == 2
    assert document(result) == {"error": {"type": "JobNotFound", "message": "no job 'j2'"}}


def test_list(api):
    result = dt("list", "--scheduler", ADDRESS)
    assert result.exit_code == 0
    assert "a [red] name" in result.stdout
    assert "SUCCEEDED" in result.stdout
    (job,) = document(dt("list", "--scheduler", ADDRESS, "--json"))["jobs"]
    assert (job["id"], job["state"], job["loss"]) == ("j1", "SUCCEEDED", 0.25)


def test_list_of_nothing(api, monkeypatch):
    monkeypatch.setattr(api, "handle", None)
    result = dt("list", "--scheduler", ADDRESS)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no jobs\n")
    assert document(dt("list", "--scheduler", ADDRESS, "--json")) == {"jobs": []}


def test_status(api):
    api.handle = FakeHandle(FAILED)
    result = dt("status", "j1", "--scheduler", ADDRESS)
    assert result.exit_code == 0
    assert "ValueError: no" in result.stdout
    assert "remote line" in result.stderr
    assert set(document(dt("status", "j1", "--scheduler", ADDRESS, "--json"))) == set(FAILED)


RUNNING = {
    **DONE,
    "state": "RUNNING",
    "replicas": {"0": "tcp://a", "1": "tcp://b"},
    "ledger": {
        "applied": 120, "late": 3, "rejected": 0, "replayed": 0, "duplicates": 1,
        "samples": [1200], "staleness": {"0": 100, "2": 20},
    },
    "local_steps": {"0": 62, "1": 61},
    "doing": {
        "0": "waiting for replica 1 for 4.9 s",
        "1": "computing for 5.2 s (step 61, partition 1, batch 7)",
    },
    "waiting": [
        {"replica": 0, "worker": "tcp://a", "for": [1], "step": 61, "barrier": None,
         "seconds": 4.9, "computing": {"1": 5.2}},
    ],
}  # fmt: skip


def test_status_shows_what_each_replica_does(api):
    api.handle = FakeHandle(RUNNING)
    shown = dt("status", "j1", "--scheduler", ADDRESS).stdout
    lines = [re.split(r"  +", line.strip()) for line in shown.splitlines()]
    assert ["REPLICA", "WORKER", "LOCAL STEPS", "DOES"] in lines
    assert ["0", "tcp://a", "62", "waiting for replica 1 for 4.9 s"] in lines
    does = "computing for 5.2 s (step 61, partition 1, batch 7)"
    assert ["1", "tcp://b", "61", does] in lines
    assert ["steps", "40"] in lines
    assert ["gradients", "applied 120, late 3, duplicates 1"] in lines
    assert ["staleness", "100 of age 0, 20 of age 2"] in lines
    found = document(dt("status", "j1", "--scheduler", ADDRESS, "--json"))
    for key in ("waiting", "local_steps", "doing", "step"):
        assert found[key] == RUNNING[key]


def test_status_of_many_replicas_shows_some(api):
    places = {str(i): "tcp://a" for i in range(100)}
    api.handle = FakeHandle({**RUNNING, "replicas": places, "doing": {}})
    shown = dt("status", "j1", "--scheduler", ADDRESS).stdout
    assert "and 36 more" in shown
    assert len(shown.splitlines()) < 100


def test_status_of_a_smooth_job_has_no_line_of_gradients(api):
    smooth = {"applied": 120, "late": 0, "samples": [1200], "staleness": {"0": 120}}
    api.handle = FakeHandle({**RUNNING, "ledger": smooth})
    shown = dt("status", "j1", "--scheduler", ADDRESS).stdout
    assert "gradients" not in shown
    assert "staleness" not in shown


def test_status_shows_the_bytes_at_each_worker(api):
    placement = {
        "0": {"worker": "tcp://a", "bytes": 3 << 20},
        "1": {"worker": "tcp://b", "bytes": 1 << 20},
        "2": {"worker": "tcp://b", "bytes": 1 << 20},
    }
    api.handle = FakeHandle({**DONE, "placement": placement, "imbalance": 0.2})
    shown = dt("status", "j1", "--scheduler", ADDRESS).stdout
    assert "3.00 MiB at tcp://a, 2.00 MiB at tcp://b" in shown
    assert "20.0%" in shown


def test_events(api):
    result = dt("events", "j1", "--scheduler", ADDRESS)
    assert result.exit_code == 0
    assert "RUNNING" in result.stdout
    assert "saved [step-00000012]" in result.stdout
    found = document(dt("events", "j1", "--scheduler", ADDRESS, "--json"))
    assert found == {"id": "j1", "events": api.handle.events()}


def test_why(api):
    result = dt("why", "j1", "--scheduler", ADDRESS)
    assert (result.exit_code, result.stdout) == (0, "2 of 4 workers are there\n")
    found = document(dt("why", "j1", "--scheduler", ADDRESS, "--json"))
    assert found == {"id": "j1", "state": "SUCCEEDED", "why": "2 of 4 workers are there"}


def test_cancel(api):
    result = dt("cancel", "j1", "--scheduler", ADDRESS)
    assert (result.exit_code, result.stdout) == (0, "j1 CANCELLED\n")
    found = document(dt("cancel", "j1", "--scheduler", ADDRESS, "--json"))
    assert found == {"id": "j1", "state": "CANCELLED"}


def test_doctor(api):
    result = dt("doctor")
    assert "8 threads; 1 while training" in result.stdout
    assert "devices of the workers: cpu (CuPy finds none)" in result.stdout
    assert result.exit_code == 0
    assert "here" in result.stdout
    assert api.connected == [(None, 1)]
    api.doctor_ok = False
    result = dt("doctor", "--scheduler", ADDRESS)
    assert result.exit_code == 3
    assert "no dtrain" in result.stdout
    result = dt("doctor", "--json")
    assert result.exit_code == 3
    assert [worker["ok"] for worker in document(result)["workers"]] == [True, False]


# --- cluster start.


class FakeCluster:
    made: dict[str, Any]
    scheduler_address = ADDRESS
    dashboard_link = "http://127.0.0.1:8787/status"

    def __init__(self, **options: Any) -> None:
        FakeCluster.made = options
        if options["scheduler_port"] == 1:
            raise RuntimeError("Cluster failed to start")
        signal.raise_signal(signal.SIGTERM)  # it comes while we start: we end right after

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(self, *_: object) -> None:
        FakeCluster.made["closed"] = True


def heard(preload: str, message: str, *args: str) -> list[str]:
    """What Dask's worker logs of an error, in a process that has run the preload."""
    code = f"""{preload}
logging.basicConfig(format="%(message)s")
logging.getLogger("distributed.worker").error({message!r}, *{args!r})
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    return found.stderr.splitlines()


def test_cluster_start(monkeypatch):
    monkeypatch.setattr(distributed, "LocalCluster", FakeCluster)
    monkeypatch.setattr(dtrain, "jobs", lambda address: [])
    result = dt("cluster", "start", "--workers", "3", "--threads", "2", "--port", "0")
    assert result.exit_code == 0
    assert f"export DTRAIN_SCHEDULER={ADDRESS}" in result.stdout
    assert "http://127.0.0.1:8787/status" in result.stdout
    (preload,) = FakeCluster.made.pop("preload")
    assert heard(preload, "Invalid Worker.status transition: %s -> %s", "closing", "running") == []
    assert heard(preload, "out of %s", "memory") == ["out of memory"]
    assert FakeCluster.made == {
        "n_workers": 3,
        "threads_per_worker": 2,
        "host": "127.0.0.1",
        "scheduler_port": 0,
        "dashboard_address": "127.0.0.1:8787",
        "closed": True,
    }


def test_cluster_start_on_a_taken_port(monkeypatch):
    monkeypatch.setattr(distributed, "LocalCluster", FakeCluster)
    result = dt("cluster", "start", "--port", "1")
    assert result.exit_code == 3
    assert "--port" in result.stderr


@pytest.mark.parametrize("text", ["8787", ":x", "", ":99999"])
def test_cluster_start_wants_a_dashboard_address(text):
    result = dt("cluster", "start", "--dashboard", text)
    assert result.exit_code == 2
    assert "[HOST]:PORT" in result.stderr


@pytest.mark.cluster
def test_a_started_cluster_ends_on_ctrl_c():
    """Ctrl-C reaches every process of the terminal; the workers must leave it to us."""
    args = ["cluster", "start", "--workers", "1", "--port", "0", "--dashboard", ":0"]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *args],
        env={**ENV, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[0].startswith("scheduler  tcp://127.0.0.1:")
        assert lines[1].startswith("dashboard  http://127.0.0.1:")
        with distributed.Client(lines[2].split("=")[1].strip(), timeout="20s") as client:
            client.wait_for_workers(1, timeout=20)
            os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in errors


# --- Usage, help, version.


@pytest.mark.parametrize(
    ("args", "is_right"),
    [
        (["submit", "--json"], lambda found: found["reason"] == "UsageError"),
        (["list", "--json", "--no"], lambda found: found["error"]["type"] == "UsageError"),
    ],
)
def test_wrong_usage_with_json(monkeypatch, capsys, args, is_right):
    monkeypatch.setattr(sys, "argv", ["dtrain", *args])
    with pytest.raises(SystemExit) as info:
        cli.run()
    assert info.value.code == 2
    said = capsys.readouterr()
    assert is_right(json.loads(said.out))
    assert "Usage:" in said.err


def test_run_gives_the_exit_code_with_json(api, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dtrain", "list", "--json"])
    with pytest.raises(SystemExit) as info:
        cli.run()
    assert info.value.code == 3
    assert json.loads(capsys.readouterr().out)["error"]


def test_version(monkeypatch):
    monkeypatch.setattr(dtrain, "__version__", "1.2.3", raising=False)
    assert dt("--version").stdout == "dtrain 1.2.3\n"


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["submit"],
        ["list"],
        ["status"],
        ["why"],
        ["events"],
        ["cancel"],
        ["doctor"],
        ["cluster", "start"],
    ],
)
def test_help_has_an_example(args):
    result = dt(*args, "--help")
    assert result.exit_code == 0
    assert "Example" in result.stdout


def test_help_needs_no_heavy_module():
    code = (
        "import sys, dtrain_cli.main\n"
        "heavy = {'dask', 'distributed', 'numpy', 'pydantic', 'rich', 'torch'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
