"""The benchmarks run and say what they promise; how fast anything is, is not tested."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks import master, notes
from benchmarks.plain import Loop
from benchmarks.report import Turn, interleaved, summary
from benchmarks.workloads import LEARNING_RATE, MOMENTUM, WORKLOADS, Workload
from dtrain.models import MLP

ROOT = Path(__file__).parents[2]
SIDES = ["plain", "plain x2", "dtrain 1", "dtrain 2"]
RATIOS = ["over plain", "over plain x2", "1 replica over plain"]
QUICK = ["--rounds", "1", "--steps", "5", "--epochs", "2", "--seconds", "0.05"]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.cluster
def test_sync_measures_all_sides_in_one_environment():
    done = run("sync", "--model", "small", *QUICK, "--where", "--json", OPENBLAS_CORETYPE="Haswell")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["command"] == "sync"
    assert found["date"].startswith("20")
    assert found["machine"]["cpu"]
    assert found["machine"]["cores"] >= 1
    assert found["environment"]["unset"]["OPENBLAS_CORETYPE"] == "Haswell"
    assert list(found["blas"]) == ["plain 0", "plain 1", "worker 0", "worker 1"]
    for pools in found["blas"].values():
        assert all(pool["num_threads"] == 1 for pool in pools)
    assert found["idle_cores"]["dtrain"] >= 0
    assert (found["peers"], found["left_out"]) == ({}, [])
    (workload,) = found["workloads"]
    assert (workload["name"], workload["batch"], workload["rows"]) == ("small", 32, 6 * 32)
    assert list(workload["rates"]) == list(workload["medians"]) == SIDES
    assert list(workload["ratios"]) == RATIOS
    for side in SIDES:
        (rate,) = workload["rates"][side]
        assert rate == workload["medians"][side] > 0
    assert [len(workload["parts"][side][0]) for side in SIDES] == [1, 2, 1, 1]
    assert all(ratio > 0 for ratio in workload["ratios"].values())
    assert list(workload["where"]) == ["plain", "dtrain 1", "dtrain 2"]
    for split in workload["where"].values():
        assert split["step"] > 0
        assert split["gradients"] > 0
    # The tables went to stderr.
    assert "1 replica over plain" in done.stderr


@pytest.mark.cluster
def test_async_measures_peers_and_what_a_slow_replica_leaves_of_the_other():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    quick = ["--rounds", "1", "--steps", "200", "--epochs", "2", "--seconds", "0.05"]
    # A Python that has no TensorFlow: the rest is measured all the same.
    peers = ["--peers", "--tensorflow", without_tensorflow()]
    done = run("async", "--model", "small", *quick, *peers, "--slow", "3", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["peers"]) == ["ddp"]
    assert found["peers"]["ddp"]["threads"] == 1
    assert [line.split(":")[0] for line in found["left_out"]] == ["tf"]
    assert found["left_out"][0] in done.stderr
    assert list(found["idle_cores"]) == ["dtrain", "ddp"]
    (workload,) = found["workloads"]
    sides = ["plain", "plain x2", "ddp", "dtrain sync", "dtrain async"]
    assert list(workload["rates"]) == sides
    assert all(rate > 0 for rates in workload["rates"].values() for rate in rates)
    assert [len(workload["parts"][side][0]) for side in sides] == [1, 2, 2, 1, 1]
    named = ["over plain", "over plain x2", "over sync", "over ddp", "other replica kept"]
    assert list(workload["ratios"]) == named
    assert all(ratio > 0 for ratio in workload["ratios"].values())
    slow = workload["slow"]
    assert slow["times"] == 3
    assert slow["kept"]["epoch"] == workload["ratios"]["other replica kept"]
    for name in ("even", "slow"):
        assert all(slow["steps_per_s"][name][window][0] > 0 for window in ("epoch", "own part"))
    assert "other replica kept" in done.stderr


def without_tensorflow() -> str:
    if importlib.util.find_spec("tensorflow") is not None:
        pytest.skip("TensorFlow is installed here")
    return sys.executable


@pytest.mark.cluster
def test_tensorflow_is_measured_and_its_servers_end():
    python = os.environ.get("DTRAIN_TENSORFLOW")
    if not python:
        pytest.skip("DTRAIN_TENSORFLOW names no Python with TensorFlow")
    done = run("sync", "--model", "small", *QUICK, "--tensorflow", python, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["peers"]) == ["ddp", "tf"]
    (workload,) = found["workloads"]
    assert workload["rates"]["tf"][0] > 0
    assert list(workload["ratios"]) == [*RATIOS, "over ddp", "over tf"]
    servers = found["peers"]["tf"]["servers"]
    assert len(servers) == 3
    assert not any(psutil.pid_exists(pid) for pid in servers)


@pytest.mark.cluster
def test_transport_measures_empty_steps_and_remote_transfers():
    quick = ["--rounds", "2", "--steps", "200", "--seconds", "0.01", "--largest", "8192"]
    done = run("transport", *quick, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    step = found["step"]
    assert step["parameters"] == 9610
    assert list(step["us"]) == ["shared memory", "comm", "1 worker"]
    for side, us in step["us"].items():
        assert len(step["rates"][side]) == 2
        assert us == pytest.approx(1e6 / step["medians"][side])
    assert step["shared"]["comm"] is False
    assert [size["bytes"] for size in found["remote"]] == [1024, 8192]
    for size in found["remote"]:
        for op, ways in (("pull", 1), ("push and pull", 2)):
            assert list(size["seconds"][op]) == ["dtrain", "tcp"]
            for side, rate in size[op]["gb_per_s"].items():
                assert len(size["seconds"][op][side]) == 2
                assert rate == pytest.approx(ways * size["bytes"] / size[op]["us"][side] / 1e3)
            assert size[op]["over tcp"] > 0
    assert "over tcp" in done.stderr


@pytest.mark.cluster
def test_queues_are_measured_beside_dasks_own():
    done = run("queues", "--rounds", "1", "--items", "4", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ours, actor = "dtrain", "Dask actor"
    sent, spread = ["dtrain, sent", "dtrain, left"], "dtrain, a shard on each worker"
    expected = {
        "queues": {
            "a put and a get": [ours, "Dask Queue", actor],
            "client to client": [ours, "Dask Queue", actor],
            "client to task": [ours, "Dask Queue", actor],
            "task to task": [ours, *sent, "Dask Queue", actor],
        },
        "variables": {
            "assign and pull": [ours, spread, "Dask Variable", actor],
            "push": [ours, spread, actor],
        },
    }
    for kind, rows in expected.items():
        assert list(found[kind]) == list(rows)
        for words, sides in rows.items():
            assert list(found[kind][words]) == ["small", "1 MiB"]
            for of in found[kind][words].values():
                assert list(of["rates"]) == sides
                assert list(of["ratios"]) == [f"over {side}" for side in sides[1:]]
                assert all(len(turns) == 1 and turns[0] > 0 for turns in of["rates"].values())
    assert "Dask Variable" in done.stderr


@pytest.mark.cluster
def test_ingraph_measures_both_ways_and_a_bare_graph():
    done = run("ingraph", "--rounds", "2", "--steps", "5", "--shards", "2", "--json")
    assert done.returncode == 0, done.stderr
    (rates,) = json.loads(done.stdout)["ms_per_step"].values()
    assert list(rates) == ["between-graph", "in-graph", "bare graph"]
    assert all(len(turns) == 2 and min(turns) > 0 for turns in rates.values())
    assert "ms per step" in done.stderr


def test_master_drives_the_machines_from_the_first_hello_to_the_end():
    done = run("master", "--workers", "4", "--workers", "12", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [size["workers"] for size in found["sizes"]] == [4, 12]
    for size in found["sizes"]:
        n = size["workers"]
        counts = {part: of["events"] for part, of in size["parts"].items()}
        assert counts["join and hello"] == counts["sync: a step at the lead"] == 2 * n
        assert counts["barrier: all evaluated"] == counts["heartbeats"] == n
        assert all(of["events_per_s"] > 0 for of in size["parts"].values())
        assert all(held > 0 for held in size["memory"].values())
        messages = size["messages"]
        assert messages["a steady step"] == {
            "to": "scheduler",
            "per": "step",
            "count": 0,
            "bytes": 0,
        }
        assert messages["push"]["count"] == n - 1
        assert all(m["bytes"] > 0 for what, m in messages.items() if what != "a steady step")
    assert found["growth"].keys() == found["sizes"][0]["parts"].keys()
    # A launch tells each worker of all others.
    small, large = (size["messages"]["launch"]["bytes"] for size in found["sizes"])
    assert large > small


def test_growth_is_the_exponent_and_tells_what_is_left_out():
    sizes = [
        {"workers": n, "parts": {"one": {"seconds": n * 1e-6}, "two": {"seconds": n * n * 1e-6}}}
        for n in (10, 100, 1000)
    ]
    assert master.growth(sizes, "one") == pytest.approx(1)
    assert master.growth(sizes, "two") == pytest.approx(2)
    assert master.growth(sizes[:1], "two") is None
    assert master.expected(sizes, "two", 10_000) == pytest.approx(100)
    world = master.World(3)
    ran = []
    for part, _, act in master.life(world, [master.PLACEMENT, master.BATCHES]):
        act()
        ran.append(part)
    assert len(ran) == 8
    assert not {master.PLACEMENT, master.BATCHES} & set(ran)


def test_environment_is_settled_although_numpy_was_loaded_before(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import numpy\n")
    script = (
        "from benchmarks import environment; environment.settle(); environment.check(); "
        "print(environment.unset())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OPENBLAS_L2_SIZE": "512"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "'OPENBLAS_L2_SIZE': '512'" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["sync", "--model", "huge"],
        ["sync", "--epochs", "1"],
        ["sync", "--tensorflow", "/no/such/python"],
        ["async", "--slow", "1"],
        ["transport", "--largest", "1"],
        ["master", "--workers", "1"],
    ],
)
def test_wrong_usage_is_refused(words):
    done = run(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_plain_loop_does_the_work_of_dtrain():
    workload = Workload("tiny", (5, 7, 6, 3), batch=4, steps=3)
    loop = Loop(workload, *workload.data())
    model = MLP(workload.widths)

    def named(weights: list[Any], biases: list[Any]) -> dict[str, Any]:
        flat = [array.copy() for pair in zip(weights, biases, strict=True) for array in pair]
        return dict(zip((name for pair in model.names for name in pair), flat, strict=True))

    params = named(loop.weights, loop.biases)
    momenta = {name: np.zeros_like(value) for name, value in params.items()}
    for _ in range(5):
        loop.take()
        batch = loop.acts[0].copy(), loop.labels.copy()
        loss, grads = model.loss_and_grads(params, batch)
        loop.gradients()
        assert loop.loss == pytest.approx(loss, rel=1e-5)
        loop.update()
        for name, param in params.items():
            momenta[name] = MOMENTUM * momenta[name] + grads[name]
            param -= LEARNING_RATE * momenta[name]
        for name, found in named(loop.weights, loop.biases).items():
            np.testing.assert_allclose(found, params[name], rtol=1e-4, atol=1e-6)


def test_plain_loop_takes_every_row_once_an_epoch():
    workload = Workload("tiny", (2, 2), batch=4, steps=3)
    x, y = workload.data()
    loop = Loop(workload, x, y)
    taken = []
    for _ in range(workload.steps):
        loop.take()
        taken.append(loop.acts[0].copy())
    np.testing.assert_array_equal(np.unique(np.concatenate(taken), axis=0), np.unique(x, axis=0))


def test_turns_are_interleaved_and_ratios_are_of_medians():
    order: list[str] = []
    rates = {"a": [1.0, 9.0, 3.0], "b": [4.0, 6.0, 50.0]}

    def measure(name: str) -> Turn:
        order.append(name)
        return Turn(rates[name][order.count(name) - 1], [])

    sides = {name: (lambda name=name: measure(name)) for name in rates}
    ratios = {"b over a": ("b", "a"), "c over a": ("c", "a")}
    found = summary(interleaved(sides, 3, lambda line: None), ratios)
    assert order == ["a", "b"] * 3
    assert found["rates"] == rates
    assert found["medians"] == {"a": 3.0, "b": 6.0}
    # What was not measured has no ratio.
    assert found["ratios"] == {"b over a": 2.0}


def test_steps_are_counted_between_calls():
    notes.forget()
    assert notes.steps_per_s(0) is None
    for _ in range(4):
        notes.note()
    assert notes.steps_per_s(1) > 0
    assert notes.steps_per_s(1, 2) is None
    notes.forget()


def test_epochs_are_whole_batches_for_each_replica():
    assert WORKLOADS["mnist"].sized(5, 2).steps == 6
    assert all(w.sized(None, 2) == w for w in WORKLOADS.values())
