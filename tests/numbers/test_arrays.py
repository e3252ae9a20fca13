from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest

from dtrain import arrays
from dtrain.errors import SpecError


def test_cpu_is_numpy():
    assert arrays.namespace("cpu") is np


class _FakeCupy:
    """Stands for a CuPy with one GPU, or with none."""

    def __init__(self, count):
        self.cuda = self
        self.runtime = self
        self.is_available = lambda: count > 0
        self.getDeviceCount = lambda: count


def test_auto_takes_the_gpu_only_if_there_is_one(monkeypatch):
    some, none = _FakeCupy(1), _FakeCupy(0)
    monkeypatch.setitem(sys.modules, "cupy", some)
    assert arrays.namespace("auto") is some
    assert arrays.namespace("cuda") is some
    assert arrays.namespace("cuda:0") is some
    monkeypatch.setitem(sys.modules, "cupy", none)
    assert arrays.namespace("auto") is np
    monkeypatch.setitem(sys.modules, "cupy", None)  # its import fails
    assert arrays.namespace("auto") is np


def test_a_missing_gpu_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SpecError, match=r"device: found 'cuda:1'.*CuPy cannot be imported"):
        arrays.namespace("cuda:1")
    monkeypatch.setitem(sys.modules, "cupy", _FakeCupy(0))
    with pytest.raises(SpecError, match=r"found 'cuda', expected a CUDA device.*finds none"):
        arrays.namespace("cuda")
    monkeypatch.setitem(sys.modules, "cupy", _FakeCupy(1))
    with pytest.raises(SpecError, match="found 'cuda:1', expected a number below 1"):
        arrays.namespace("cuda:1")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "CPU", "", None, 0])
def test_other_devices_are_refused(device):
    with pytest.raises(SpecError, match="expected 'cpu', 'cuda', 'cuda:<number>' or 'auto'"):
        arrays.namespace(device)


def test_the_numbers_floor_does_not_import_cupy():
    code = (
        "import sys, numpy as np; sys.modules['cupy'] = None; "
        "import dtrain.arrays as a, dtrain.optim, dtrain.partition, dtrain.models; "
        "assert a.xp_of(np.ones(2)) is np"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_xp_of_and_to_numpy(xp):
    values = xp.arange(6, dtype="float32").reshape(2, 3)
    assert arrays.xp_of(values) is xp
    host = arrays.to_numpy(values)
    assert type(host) is np.ndarray
    assert host.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_to_numpy_does_not_copy_host_memory():
    values = np.ones(3)
    assert arrays.to_numpy(values) is values


@pytest.mark.parametrize("nbytes", [1, 63, 64, 1000, 100_000])
def test_aligned_bytes(xp, nbytes):
    kept = [arrays.aligned_bytes(nbytes, xp) for _ in range(5)]
    for buffer in kept:
        assert buffer.dtype == np.uint8
        assert buffer.shape == (nbytes,)
        assert arrays.address(buffer) % arrays.ALIGNMENT == 0
        assert not buffer.any()


def test_copy_into_casts_from_either_device(xp):
    target = xp.zeros((2, 2), "float32")
    arrays.copy_into(target, np.array([[1, 2], [3, 4]]))
    assert arrays.to_numpy(target).tolist() == [[1, 2], [3, 4]]
    host = np.zeros((2, 2))
    arrays.copy_into(host, target)
    assert host.tolist() == [[1, 2], [3, 4]]


def test_quiet_hides_warnings_only_inside():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with arrays.quiet():
            assert np.isnan(np.zeros(1) / np.zeros(1)).all()
        with pytest.raises(RuntimeWarning):
            np.zeros(1) / np.zeros(1)
