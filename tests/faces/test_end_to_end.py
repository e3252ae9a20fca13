"""The command line and scripts, in real processes: what people see, and what is left behind."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import signal
import socket
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

import dtrain
from dtrain.models import Linear
from tests.conftest import until
from tests.faces.shell import DTRAIN, OTHER, WITHOUT, Command, Shell, Site, site

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
TRACEBACK = "Traceback (most recent call last)"
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

OWN = '''
import os, threading
from pathlib import Path
import numpy as np

class Plain:
    """Least squares."""
    task = "regression"

    def init(self, rng):
        return {"w": np.zeros(2)}

    def loss_and_grads(self, params, batch):
        x, y = batch
        error = x @ params["w"] - y
        return float(np.mean(error**2)), {"w": 2 * x.T @ error / len(y)}

    def predict(self, params, x):
        return x @ params["w"]

class Paced(Plain):
    """Its steps take a while; it leaves a file named by its process."""

    def __init__(self, folder):
        self.folder = folder

    def loss_and_grads(self, params, batch):
        (Path(self.folder) / f"step-{os.getpid()}").touch()
        threading.Event().wait(0.05)
        return super().loss_and_grads(params, batch)

class Unlucky(Plain):
    def init(self, rng):
        print("printed by a worker")
        return super().init(rng)

    def loss_and_grads(self, params, batch):
        if (batch[1] == 13).any():
            raise Misfortune("row 13 is unlucky")
        return super().loss_and_grads(params, batch)

class Misfortune(Exception):
    pass

def data(rows=20, bad_x=None, bad_y=None, columns=1, classes=None):
    X = np.random.default_rng(0).normal(size=(rows, 2))
    y = np.arange(rows) * 1.0
    if classes:
        y = y % classes
    if bad_x is not None:
        X[bad_x] = np.nan
    if bad_y is not None:
        y[bad_y] = np.nan
    if columns > 1:
        y = np.stack([y] * columns, axis=1)
    return X, y
'''

LINEAR = 'kind = "linear"\nn_features = 2'
MLP = 'kind = "mlp"\nlayers = [2, 3]'


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A user on a machine of one's own, without a cluster."""
    found = Shell(tmp_path)
    found.write("own.py", OWN)
    yield found
    assert found.left() == []


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A cluster that was started by hand, with dtrain on its machines."""
    folder = tmp_path_factory.mktemp("site")
    with site(folder, DASK_DTRAIN__CLIENT_LEASE="1s") as found:
        found.workers("ada", "bob", nanny=True)
        yield found


@pytest.fixture
def user(tmp_path: Path, running: Site) -> Iterator[Shell]:
    """A user of the running cluster."""
    found = Shell(tmp_path, running.address)
    found.write("own.py", OWN)
    yield found
    assert found.left() == []


def spec(shell: Shell, model: str, data: str = "", train: str = "") -> str:
    """A file for two replicas that take their rows as they lie, five to a batch."""
    return shell.write(
        "job.toml",
        f'[model]\n{model}\n[data]\nfactory = "own:data"\nargs = {{ {data} }}\n'
        f"[train]\nreplicas = 2\nbatch_size = 5\nshuffle = false\n{train}\n",
    )


def paced(shell: Shell, length: str = "steps = 10_000") -> str:
    """A job that trains long enough to be interrupted."""
    return spec(shell, f'kind = "own:Paced"\nfolder = "{shell.folder}"', train=length)


def training(shell: Shell) -> set[int]:
    """Wait until both workers train; their processes."""

    def found() -> set[int]:
        return {int(path.name.partition("-")[2]) for path in shell.folder.glob("step-*")}

    until(lambda: len(found()) == 2, 40.0, "nobody trains")
    return found()


def state(shell: Shell, job: str) -> str:
    return shell.dtrain("status", job, "--json").document["state"]


def job_of(words: str) -> str:
    """The id that a submit tells."""
    found = re.search(r"job (\S+) submitted", words)
    assert found, words
    return found[1]


def starts(shell: Shell, *args: str, length: str = "steps = 10_000") -> tuple[Command, str]:
    """An attached submit of a paced job that has begun to train, and the job's id."""
    log = shell.folder / "err"
    with log.open("wb") as err:
        file = paced(shell, length)
        command = shell.start(DTRAIN, "submit", *args, file, stderr=err.fileno())
    training(shell)
    return command, job_of(log.read_text())


# -- examples ----------------------------------------------------------------------------------


def test_the_digits_example(shell, digits):
    shutil.copytree(EXAMPLES, shell.folder / "examples")
    ended = shell.dtrain("submit", "examples/digits.toml", seconds=60)
    assert ended.code == 0, ended
    assert re.fullmatch(r"job digits-\w{8} submitted to an embedded cluster\n", ended.err)
    shown = dict(re.split(r"  +", line.strip()) for line in ended.out.splitlines())
    assert list(shown) == [
        "job", "name", "state", "epochs", "steps", "loss", "val_loss", "val_accuracy",
        "samples/s", "seconds", "replicas", "model",
    ]  # fmt: skip
    assert shown["state"] == "SUCCEEDED"
    assert shown["replicas"] == "2 on 2 workers (cpu)"
    assert float(shown["val_accuracy"]) >= 0.97
    folder = shell.folder / "examples" / "digits-model"
    assert shown["model"] == str(folder)
    X, y = digits
    assert np.mean(dtrain.load(folder).predict(X) == y) >= 0.97


def test_json_is_one_object_and_output_and_name_are_ours(shell):
    shutil.copytree(EXAMPLES, shell.folder / "examples")
    args = ("--json", "--name", "my [digits]", "--output", "out/model")
    ended = shell.dtrain("submit", "examples/digits.toml", *args, seconds=60)
    assert ended.code == 0, ended
    found = ended.document
    assert {"id", "state", "reason", "metrics", "history", "output"} <= set(found)
    assert (found["state"], found["reason"]) == ("SUCCEEDED", None)
    assert found["id"].startswith("my--digits-")
    assert found["metrics"]["val_accuracy"] >= 0.97
    assert len(found["history"]) == 30
    assert found["output"] == str(shell.folder / "out" / "model")
    assert dtrain.load(found["output"]).version == found["history"][-1]["step"]
    assert not (shell.folder / "examples" / "digits-model").exists()


def test_the_digits_script(shell):
    shutil.copytree(EXAMPLES, shell.folder / "examples")
    ended = shell.run(sys.executable, "examples/digits.py", seconds=60)
    assert (ended.code, ended.err) == (0, ""), ended
    assert float(re.search(r"val_accuracy ([0-9.]+)", ended.out)[1]) >= 0.97


def test_the_script_of_every_way_of_replication(shell):
    shutil.copytree(EXAMPLES, shell.folder / "examples")
    ended = shell.run(sys.executable, "examples/replication.py", seconds=150)
    assert ended.code == 0, ended
    rows = re.findall(r"^((?:between|in)-graph.*?) +(0[.][0-9]+)", ended.out, re.MULTILINE)
    assert len(rows) == 6, ended
    assert all(float(accuracy) >= 0.95 for _, accuracy in rows), rows
    by_name = dict(rows)
    assert by_name["in-graph, sync"] == by_name["between-graph, sync"]


def test_a_progress_bar_on_a_terminal(shell):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = shell.start(
        DTRAIN, "submit", paced(shell, "epochs = 20"), "--name", "a [b]", stderr=theirs
    )
    os.close(theirs)
    drawn = b""
    while chunk := _read(ours):
        drawn += chunk
    os.close(ours)
    ended = command.end()
    assert ended.code == 0, (ended, drawn)
    lines = re.split(r"[\r\n]+", ANSI.sub("", drawn.decode()))
    assert all(len(line) <= 80 for line in lines), lines
    assert any("PREPARING" in line for line in lines)
    assert "a [b] SUCCEEDED" in lines[-2]
    assert "40/40" in lines[-2]
    assert re.search(r"loss [0-9.e+]+  [0-9,]+ samples/s", lines[-2])
    assert any(re.search(r"samples/s 0:00:\d\d left", line) for line in lines), lines
    assert "SUCCEEDED" in ended.out


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 65536)
    except OSError:  # Linux's way to say that the other end is closed
        return b""


# -- interrupts on a cluster of one's own ------------------------------------------------------


@pytest.mark.parametrize(("number", "times"), [("SIGINT", 1), ("SIGINT", 2), ("SIGTERM", 1)])
def test_an_interrupt_cancels_and_a_second_leaves_at_once(shell, number, times):
    command, job = starts(shell)
    for _ in range(times):
        command.interrupt(getattr(signal, number))
        until(lambda: "again to leave" in (shell.folder / "err").read_text(), 20.0, "no word")
    ended = command.end(12.0)
    err = (shell.folder / "err").read_text()
    assert (ended.code, ended.out) == (130, ""), (ended, err)
    expected = [
        f"job {job} submitted to an embedded cluster",
        f"interrupted: cancelling job {job}; again to leave at once",
        f"dtrain: job {job} CANCELLED: cancelled by a user",
    ]
    if times == 1:
        assert err.splitlines() == expected
    else:  # the last line is said if there was the time
        assert err.splitlines() in (expected, expected[:2])


def test_an_interrupt_of_a_script(shell):
    shell.write(
        "script.py",
        "import dtrain, own\n"
        "if __name__ == '__main__':\n"
        f"    model = own.Paced({str(shell.folder)!r})\n"
        "    dtrain.fit(model, *own.data(), replicas=2, steps=10_000)\n",
    )
    command = shell.start(sys.executable, "script.py")
    training(shell)
    command.interrupt()
    ended = command.end(12.0)
    assert ended.code == -signal.SIGINT
    assert ended.err.rstrip().endswith("KeyboardInterrupt")
    assert ended.err.count(TRACEBACK) == 1


# -- what goes wrong in a job ------------------------------------------------------------------


def test_a_model_that_raises(shell):
    ended = shell.dtrain("submit", spec(shell, 'kind = "own:Unlucky"'), "--json")
    assert ended.code == 1, ended
    assert (ended.document["state"], ended.document["reason"]) == ("FAILED", "USER_ERROR")
    ended.says(
        "printed by a worker",
        "FAILED: USER_ERROR: Misfortune: row 13 is unlucky",
        "replica 1, step 0, partition 1, batch 0",
        f'File "{shell.folder}/own.py", line ',
        'raise Misfortune("row 13 is unlucky")',
    )
    assert ended.err.count(TRACEBACK) == 1


def test_a_model_that_raises_in_a_script_raises_in_the_script(shell):
    shell.write(
        "script.py",
        "import dtrain, own\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        "        dtrain.fit(own.Unlucky(), *own.data(), replicas=2, batch_size=5, shuffle=False)\n"
        "    except own.Misfortune as error:\n"
        "        print(error, *error.__notes__)\n",
    )
    ended = shell.run(sys.executable, "script.py")
    assert (ended.code, ended.err) == (0, ""), ended
    for words in ("row 13 is unlucky", "replica 1, step 0", "Remote traceback", "own.py"):
        assert words in ended.out


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        (LINEAR, "bad_x = 17", "the loss of replica 1 is nan at step 1 (partition 1, batch 1)"),
        (LINEAR, "bad_y = 3", "the loss of replica 0 is nan at step 0 (partition 0, batch 0)"),
    ],
)
def test_nan_stops_a_job(user, model, data, words):
    ended = user.dtrain("submit", spec(user, model, data))
    assert (ended.code, ended.out) == (1, ""), ended
    ended.says(f"FAILED: NON_FINITE: {words}")
    assert TRACEBACK not in ended.err
    assert ended.err.count("\n") == 2


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        (LINEAR, "columns = 3", ["y: found shape (20, 3), expected 1 target"]),
        (MLP, "columns = 3", ["y: found shape (20, 3), expected (rows,) or (rows, 1)"]),
        (MLP, "classes = 3, bad_y = 4", ["y: found NaN or infinite labels"]),
        (MLP, "classes = 4", ["y: found 4 different labels", "expected at most 3"]),
        (LINEAR, "rows = 1", ["1 ", "row", "2 replicas"]),
        ('kind = "linear"\nn_features = 5', "", ["found shape (20, 2), expected 5 features"]),
    ],
)
def test_data_that_does_not_fit_is_refused(user, model, data, words):
    user.dtrain("submit", spec(user, model, data)).refused(2, *words)


def test_data_that_does_not_fit_is_refused_on_a_cluster_of_ones_own(shell):
    file = spec(shell, LINEAR, "rows = 1")
    shell.dtrain("submit", file).refused(2, "2 replicas")


def test_a_worker_that_is_killed(shell):
    """The job goes on without it, and the user gets what was asked for."""
    command, job = starts(shell, "--output", "model", length="steps = 40")
    os.kill(sorted(training(shell))[0], signal.SIGKILL)
    ended = command.end(30.0)
    err = (shell.folder / "err").read_text()
    assert ended.code == 0, (ended, err)
    assert TRACEBACK not in err
    assert f"job {job}" in ended.out + err
    found = dtrain.load(shell.folder / "model", model=Linear(2))
    whole = shell.dtrain("submit", "--output", "whole", paced(shell, "steps = 40"))
    assert whole.code == 0, whole
    expected = dtrain.load(shell.folder / "whole", model=Linear(2))
    assert found.version == expected.version == 40
    assert found.params["w"].tobytes() == expected.params["w"].tobytes()


def test_a_worker_that_is_killed_ends_a_job_that_may_lose_none(shell):
    command, job = starts(shell, length="steps = 10_000\n[recovery]\nmax_losses = 0")
    os.kill(sorted(training(shell))[0], signal.SIGKILL)
    ended = command.end(12.0)
    err = (shell.folder / "err").read_text()
    assert (ended.code, ended.out) == (1, ""), (ended, err)
    assert re.search(
        rf"dtrain: job {job} FAILED: WORKERS_LOST: worker \d \(tcp://127.0.0.1:\d+\) is gone", err
    )
    assert err.count("\n") == 2, err


# -- where it computes -------------------------------------------------------------------------


def test_a_device_that_no_worker_has_is_refused_before_the_start(user):
    ended = user.dtrain("submit", spec(user, LINEAR, train='device = "cuda:99"'))
    words = "device: found 'cuda:99', expected a worker that has it, but worker "
    ended.refused(2, words, "worker ada", "worker bob", "has cpu (CuPy ")
    ended = user.dtrain("submit", spec(user, LINEAR, train='device = "gpu"'))
    ended.refused(2, "train.device: found 'gpu', expected 'cpu', 'cuda', 'cuda:<number>' or 'auto'")


def test_the_device_is_told(user):
    ended = user.dtrain("submit", spec(user, LINEAR, train='device = "cpu"'))
    assert ended.code == 0, ended
    assert "2 on 2 workers (cpu)" in ended.out
    assert "devices of the workers: cpu" in user.dtrain("doctor").out


# -- what is wrong with a spec -----------------------------------------------------------------


def test_spec_files_that_are_wrong(shell):
    """One process each, none of which starts a cluster."""
    model = f"[model]\n{LINEAR}\n"
    np.savez(shell.folder / "data.npz", X=np.zeros((9, 2)), labels=np.zeros(9))
    objects = np.array([[1, "a"], [2, None]], dtype=object)
    np.save(shell.folder / "objects.npy", objects, allow_pickle=True)
    shell.write("noise.npz", "noise")
    for text, words in [
        ("[data]\npath='data.npz'\n[train]\nepoch = 1", ["train.epoch: ", "mean 'epochs'?"]),
        ("[data]\npath = 'data.npz'\ntarget = 'label'", ["data.target: ", "mean 'labels'?"]),
        ("[data]\npath = 'data.npz'", ["data.target: ", "'y'", "X, labels"]),
        ("[data]\npath = 'none.npz'", ["data.path: ", f"no file {shell.folder}/none.npz"]),
        ("[data]\npath = 'noise.npz'", ["data.path: ", "damaged or not a .npz file"]),
        ("[data]\npath = 'objects.npy'", ["data.path: ", "objects.npy holds Python objects"]),
        ("[data]\nfactory = 'own:date'", ["data.factory: ", "mean 'data'?"]),
        ("[data", ["is not valid TOML"]),
    ]:
        file = shell.write("job.toml", model + text)
        shell.dtrain("submit", file).refused(2, f"{shell.folder}/job.toml: ", *words)
    shell.dtrain("submit", "none.toml").refused(2, f"{shell.folder}/none.toml: ", "no such file")
    shell.dtrain("submit", "own.py").refused(2, f"{shell.folder}/own.py: ", "TOML")


# -- no cluster --------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["list"], ["status", "x"], ["why", "x"], ["cancel", "x"]])
def test_verbs_on_jobs_need_a_cluster(shell, args):
    shell.dtrain(*args).refused(3, "no cluster", "--scheduler", "DTRAIN_SCHEDULER")


def test_nobody_at_the_address(shell):
    file = spec(shell, LINEAR)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        free = "tcp://127.0.0.1:1"
        mute = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        for args, address, deadline in [
            (["submit", file], free, "5s"),
            (["list"], mute, "1s"),
            (["doctor"], mute, "1s"),
        ]:
            args += ["--scheduler", address]
            ended = shell.dtrain(*args, DASK_DTRAIN__CONNECT_DEADLINE=deadline)
            ended.refused(3, address, "no scheduler answers there")
            assert ended.seconds < float(deadline[:-1]) + 30


def test_doctor_checks_a_cluster_of_ones_own(shell):
    with ExitStack() as stack:
        with suppress(OSError):  # somebody has it: the dashboard of another cluster, say
            stack.enter_context(socket.create_server(("127.0.0.1", 8787)))
        ended = shell.dtrain("doctor", "--json")
    assert (ended.code, ended.err) == (0, ""), ended
    assert [worker["ok"] for worker in ended.document["workers"]] == [True]


@pytest.mark.parametrize("address", ["nowhere", "http://127.0.0.1:8786", "tls://127.0.0.1:1"])
def test_an_address_that_is_none(shell, address):
    for args in (["submit", spec(shell, LINEAR)], ["list"]):
        ended = shell.dtrain(*args, "--scheduler", address, DASK_DTRAIN__CONNECT_DEADLINE="60s")
        ended.refused(2, f"{address}: found no ")
        assert ended.seconds < 40


# -- dtrain is not everywhere ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "words"),
    [(WITHOUT, "dtrain cannot be imported there"), (OTHER, "has dtrain 0.0.7, expected")],
)
def test_a_scheduler_that_cannot(shell, kind, words):
    (shell.folder / "site").mkdir()
    with site(shell.folder / "site", kind) as there:
        there.workers("ada")
        shell.env["DTRAIN_SCHEDULER"] = there.address
        ended = shell.dtrain("submit", spec(shell, LINEAR))
        ended.refused(3, f"scheduler {there.address}", words)
        ended = shell.dtrain("doctor")
        assert ended.code == 3
        assert words in ended.out
        assert there.address in ended.out


def test_workers_that_cannot(shell):
    """They are named and left out, also those that come once dtrain is installed."""
    (shell.folder / "site").mkdir()
    file = spec(shell, 'kind = "own:Plain"')
    with site(shell.folder / "site") as there:
        shell.env["DTRAIN_SCHEDULER"] = there.address
        shell.dtrain("submit", file).refused(3, there.address, "it has no workers")
        ended = shell.dtrain("doctor")
        assert (ended.code, "it has no workers" in ended.out) == (3, True), ended

        there.workers("bare", kind=WITHOUT)
        bare = "ModuleNotFoundError: No module named 'dtrain'"
        shell.dtrain("submit", file).refused(3, "no worker can train", "worker bare (tcp", bare)

        there.workers("old", kind=OTHER)
        old = "has dtrain 0.0.7, expected"
        shell.dtrain("submit", file).refused(3, "worker bare (tcp", bare, "worker old (tcp", old)

        there.workers("good")
        ended = shell.dtrain("submit", file)
        assert ended.code == 0, ended
        assert "2 on 1 worker" in ended.out
        named = re.findall(r"(?m)^dtrain: warning: worker (\w+) \(.+\) is left out: ", ended.err)
        assert sorted(named) == ["bare", "old"]
        assert ended.err.count("\n") == 3, ended

        there.workers("late", kind=WITHOUT)
        ended = shell.dtrain("submit", file, "--json")
        assert ended.code == 0, ended
        assert ended.document["state"] == "SUCCEEDED"
        ended.says("dtrain: warning: worker late (tcp")
        ended = shell.dtrain("doctor")
        assert ended.code == 3, ended
        rows = {line.split()[1]: line for line in ended.out.splitlines() if "worker" in line}
        assert rows["good"].rstrip().endswith("ok")
        assert bare in rows["bare"]
        assert bare in rows["late"]
        assert old in rows["old"]


# -- scripts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["train()", "dtrain.fit(own.Plain(), *own.data())"])
def test_a_script_without_the_guard(shell, call):
    shell.write(
        "script.py",
        "import dtrain, own\n"
        "def train():\n"
        "    return dtrain.fit(own.Plain(), *own.data())\n"
        f"{call}\n",
    )
    ended = shell.run(sys.executable, "script.py")
    assert ended.code == 1
    assert ended.err.count(TRACEBACK) == 1
    ended.says("SpecError", f"{shell.folder}/script.py, line 4", 'if __name__ == "__main__":')
    assert ended.seconds < 40


def test_a_script_on_standard_input(shell):
    code = "import dtrain, own; dtrain.fit(own.Plain(), *own.data())"
    ended = shell.run("bash", "-c", f"echo '{code}' | '{sys.executable}' -")
    assert ended.code == 1
    ended.says("SpecError", "<stdin>", "expected the script in a file")


def test_code_without_a_file_as_in_a_notebook(shell):
    code = "import dtrain, own; print(dtrain.fit(own.Plain(), *own.data(), steps=9).version)"
    ended = shell.run(sys.executable, "-c", code)
    assert (ended.code, ended.out, ended.err) == (0, "9\n", ""), ended


# -- a running cluster -------------------------------------------------------------------------


def test_the_verbs_on_a_running_cluster(user, running):
    """A detached job lives on without the process that submitted it."""
    submitted = user.dtrain("submit", paced(user), "--detach", "--name", "paced")
    job = submitted.out.strip()
    assert re.fullmatch(r"paced-\w{8}", job)
    assert submitted.err == (
        f"job {job} submitted; see `dtrain status {job} --scheduler {running.address}`\n"
    )
    training(user)
    assert state(user, job) == "RUNNING"

    listed = user.dtrain("list", "--scheduler", running.address, DTRAIN_SCHEDULER="tcp://a:1")
    (row,) = [line for line in listed.out.splitlines() if line.startswith(job)]
    assert row.split()[1:3] == ["paced", "RUNNING"]
    why = user.dtrain("why", job)
    assert (why.code, why.err) == (0, "")
    assert why.out.startswith("it is running; nobody waits for long") or "waits for" in why.out
    shown = user.dtrain("status", job)
    assert "2 on 2 workers" in shown.out
    assert "LOCAL STEPS" in shown.out
    assert set(user.dtrain("status", job, "--json").document["local_steps"]) == {"0", "1"}

    cancelled = user.dtrain("cancel", job)
    assert (cancelled.code, cancelled.err) == (0, "")
    assert re.fullmatch(rf"{job} (STOPPING|CANCELLED)\n", cancelled.out)
    until(lambda: state(user, job) == "CANCELLED", 30.0, "not cancelled")
    shown = user.dtrain("status", job)
    assert shown.code == 0
    assert "cancelled by a user" in shown.out
    assert user.dtrain("cancel", job).out == f"{job} CANCELLED\n"

    attached = user.dtrain("submit", spec(user, LINEAR, "rows = 200"), "--json")
    assert attached.code == 0, attached
    assert attached.err == f"job {attached.document['id']} submitted to {running.address}\n"
    assert user.dtrain("doctor").code == 0


@pytest.mark.parametrize("verb", ["status", "why", "cancel"])
def test_a_job_that_is_not_there(user, verb):
    user.dtrain(verb, "nobody").refused(2, "job 'nobody'", "not on this cluster")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_an_interrupt_cancels_the_job_on_the_cluster(user, number):
    command, job = starts(user)
    command.interrupt(getattr(signal, number))
    ended = command.end(12.0)
    assert (ended.code, ended.out) == (130, "")
    assert state(user, job) == "CANCELLED"
    assert user.dtrain("submit", spec(user, LINEAR)).code == 0


def test_an_attached_job_ends_with_its_client_but_not_with_who_looks_at_it(user):
    command, job = starts(user)
    shown = user.dtrain("status", job, "--json").document
    assert (shown["state"], shown["attached"]) == ("RUNNING", True)
    user.dtrain("why", job)
    step = shown["step"]
    # For longer than the lease, nobody ends it: more steps than fit into a second of pauses.
    until(
        lambda: user.dtrain("status", job, "--json").document["step"] > step + 40, 20.0, "no steps"
    )
    assert state(user, job) == "RUNNING"
    command.kill()
    command.process.communicate()
    until(lambda: state(user, job) == "CANCELLED", 30.0, "it outlives its client")
    assert "its client went away" in user.dtrain("status", job).out
    assert user.dtrain("submit", spec(user, LINEAR)).code == 0


def test_a_scheduler_that_is_killed(shell):
    (shell.folder / "site").mkdir()
    with site(shell.folder / "site") as there:
        there.workers("ada", "bob")
        shell.env["DTRAIN_SCHEDULER"] = there.address
        command, job = starts(shell, "--json")
        there.kill_scheduler()
        ended = command.end(12.0)
        # Only what the workers take with them goes: killed in the middle of it, they leave files.
        there.wait()
    err = (shell.folder / "err").read_text()
    assert ended.code == 3, (ended, err)
    assert (ended.document["id"], ended.document["state"]) == (job, None)
    assert re.fullmatch(rf"dtrain: {there.address}: no scheduler answers .+", err.splitlines()[1])
    assert err.count("\n") == 2, err


def test_a_cluster_on_a_port_that_is_taken(shell):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        args = ("--workers", "1", "--port", port, "--dashboard", ":0")
        ended = shell.dtrain("cluster", "start", *args)
    ended.refused(3, "in use", f"--port {port}")


def test_a_cluster_of_ones_own_to_keep(shell):
    args = ["cluster", "start", "--workers", "2", "--port", "0", "--dashboard", ":0"]
    cluster = shell.start(DTRAIN, *args)
    try:
        first = [cluster.line() for _ in range(3)]
        address = first[0].split()[1]
        assert first[2] == f"to use it  export DTRAIN_SCHEDULER={address}\n"
        shell.env["DTRAIN_SCHEDULER"] = address
        assert shell.dtrain("submit", spec(shell, LINEAR)).code == 0
        job = shell.dtrain("submit", paced(shell), "--detach").out.strip()
        training(shell)
        cluster.interrupt()
        ended = cluster.end(15.0)
    finally:
        cluster.kill()
    assert ended.code == 0, ended
    assert ended.err == f"Ctrl-C stops it.\ncancelling job {job}; again to leave at once\n"
