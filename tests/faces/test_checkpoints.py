"""The checkpoints in a directory, from Python and from the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import dtrain
from dtrain.layout import Layout
from dtrain.partition import partition
from dtrain.runtime.checkpoint import Snapshot, save
from dtrain.spec import Checkpoint, JobSpec, Recovery


@pytest.fixture
def place(tmp_path):
    """Two checkpoints."""
    params = {"w": np.arange(6, dtype=np.float32)}
    layout = Layout.of(params)
    buffer = np.zeros(layout.nbytes, np.uint8)
    layout.write(buffer, params)
    where = tmp_path / "ckpt"
    for step in (3, 12):
        snapshot = Snapshot(
            step=step,
            layout=layout,
            params=buffer,
            slots={},
            shards=partition(layout, 1),
            state={},
            about={"job": "j1"},
        )
        save(str(where), snapshot, keep=3)
    return where


def dt(*args):
    from dtrain_cli.main import app

    return CliRunner().invoke(app, ["checkpoints", *map(str, args)])


def test_list_shows_the_newest_first(place):
    result = dt("list", place)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["step-00000012", "12", "j1"],
        ["step-00000003", "3", "j1"],
    ]
    assert all(line.rstrip().endswith("ok") for line in lines[1:])
    found = json.loads(dt("list", place, "--json").stdout)["checkpoints"]
    assert found == dtrain.checkpoints.find(place)
    assert [entry["step"] for entry in found] == [12, 3]


def test_verify_finds_the_damaged_one(place):
    assert dt("verify", place).exit_code == 0
    part = next((place / "step-00000012").glob("part-*"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert dt("list", place).exit_code == 0  # by the manifests alone all is well
    result = dt("verify", place)
    assert result.exit_code == 1
    assert "sha256" in result.stdout
    new, old = dtrain.checkpoints.verify(place)
    assert "sha256" in new["problem"]
    assert old["problem"] is None
    assert sorted(p.name for p in place.iterdir()) == ["step-00000003", "step-00000012"]


def test_where_there_are_none(tmp_path):
    result = dt("list", tmp_path)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no checkpoints" in result.stderr
    assert dt("verify", tmp_path).exit_code == 2
    assert json.loads(dt("verify", tmp_path / "nowhere", "--json").stdout) == {"checkpoints": []}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Checkpoint(""), "checkpoint.dir: found ''"),
        (lambda: Checkpoint(3), "checkpoint.dir: found 3"),
        (lambda: Checkpoint("d", every="never"), "checkpoint.every: found 'never'"),
        (lambda: Checkpoint("d", every=0), "checkpoint.every: found 0"),
        (lambda: Checkpoint("d", every=-1.5), "checkpoint.every: found -1.5"),
        (lambda: Checkpoint("d", every=float("nan")), "checkpoint.every: found nan"),
        (lambda: Checkpoint("d", every=True), "checkpoint.every: found True"),
        (lambda: Checkpoint("d", keep=0), "checkpoint.keep: found 0"),
        (lambda: Recovery(max_losses=-1), "recovery.max_losses: found -1"),
        (lambda: Recovery(min_workers=0), "recovery.min_workers: found 0"),
        (lambda: Recovery(deadline="soon"), "recovery.deadline: found 'soon'"),
        (lambda: JobSpec(resume=True), "resume: found it without a checkpoint"),
        (lambda: JobSpec(resume="yes"), "resume: found 'yes'"),
        (lambda: JobSpec(recovery=3), "recovery: found 3"),
        (lambda: JobSpec(checkpoint="ckpt"), "checkpoint: found 'ckpt'"),
    ],
)
def test_bad_values_are_named(make, words):
    with pytest.raises(dtrain.SpecError) as caught:
        make()
    assert words in str(caught.value)


def test_times_and_steps():
    assert Checkpoint("d", every=20).steps == 20
    assert Checkpoint("d", every=20).seconds is None
    assert Checkpoint("d", every="2 min").seconds == 120
    assert Checkpoint("d", every=1.5).seconds == 1.5
    assert Checkpoint("d").steps is None
    assert Checkpoint("s3://bucket/d").dir == "s3://bucket/d"
    assert Checkpoint("d").dir.startswith("/")


def test_a_spec_travels_with_them():
    spec = JobSpec(checkpoint=Checkpoint("d", every=7), recovery=Recovery(max_losses=2))
    assert JobSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
