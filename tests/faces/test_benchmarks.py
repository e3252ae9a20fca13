"""The benchmarks run and say what they promise; how fast anything is, is not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.plain import Loop
from benchmarks.report import Turn, interleaved, summary
from benchmarks.workloads import LEARNING_RATE, MOMENTUM, WORKLOADS, Workload
from dtrain.models import MLP

ROOT = Path(__file__).parents[2]
SIDES = ["plain", "plain x2", "dtrain 1", "dtrain 2"]
RATIOS = ["dtrain 2 / plain", "dtrain 2 / plain x2", "dtrain 1 / plain"]
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
    assert found["idle_cores"] >= 0
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
    assert "dtrain 2 / plain x2" in done.stderr


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


@pytest.mark.parametrize("words", [["sync", "--model", "huge"], ["sync", "--epochs", "1"], []])
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
    found = summary(interleaved(sides, 3, lambda line: None), [("b", "a")])
    assert order == ["a", "b"] * 3
    assert found["rates"] == rates
    assert found["medians"] == {"a": 3.0, "b": 6.0}
    assert found["ratios"] == {"b / a": 2.0}


def test_epochs_are_whole_batches_for_each_replica():
    assert WORKLOADS["mnist"].sized(5, 2).steps == 6
    assert all(w.sized(None, 2) == w for w in WORKLOADS.values())
