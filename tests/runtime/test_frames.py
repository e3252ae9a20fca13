"""Nobody's garbage is collected while the frames of all threads are asked for."""

from __future__ import annotations

import gc
import sys

import pytest

from dtrain.runtime import frames


@pytest.fixture
def original(monkeypatch):
    seen = []

    def current_frames():
        seen.append(gc.isenabled())
        return {}

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    return seen


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from 3.12 on nothing is to be guarded")
@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_waits(original, enabled):
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        frames.guard()
        once = sys._current_frames
        frames.guard()
        assert sys._current_frames is once
        assert sys._current_frames() == {}
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
    assert original == [False]
