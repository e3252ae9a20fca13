"""GPUs for tests: a real one, or a stand-in for CuPy where there is none."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from dtrain import arrays
from dtrain.errors import SpecError

_STANDIN = Path(__file__).parent / "standin"

#: The parameters of a fixture that yields what :func:`cupy_of` does.
KINDS = ["stand-in", pytest.param("cupy", marks=pytest.mark.gpu)]


@contextmanager
def cupy_of(kind: str) -> Iterator[ModuleType]:
    """CuPy, or what stands for it, also in the worker processes that are started inside."""
    if kind == "stand-in":
        with stand_in() as module:
            yield module
        return
    try:
        found = arrays.namespace("cuda")
    except SpecError as error:
        pytest.skip(f"needs a GPU: {error}")
    yield found


@contextmanager
def stand_in(devices: str = "0,1") -> Iterator[ModuleType]:
    """The stand-in is what ``import cupy`` finds; ``devices`` are its GPUs, as CUDA names them."""
    paths = [str(_STANDIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", _module())
        # For the processes that are started inside.
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setattr(sys, "path", [str(_STANDIN), *sys.path])
        patch.setenv("CUDA_VISIBLE_DEVICES", devices)
        yield _module()


@functools.cache
def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cupy", _STANDIN / "cupy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
