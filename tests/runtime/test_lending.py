"""Memory that one process lends to another: the right one, or none."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from dtrain.runtime.queues.lending import Lender, Lent, lent_again

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd_create here")

X = np.arange(100_000, dtype=np.uint8)


def lent(parcel: np.ndarray = X) -> Lent:
    made = Lent.of([parcel])
    assert made is not None
    return made


def test_another_process_reads_it_and_has_it_when_the_lender_has_closed_it():
    made = lent()
    borrowed = Lent.borrowed(made.told())
    assert borrowed is not None
    made.close()
    np.testing.assert_array_equal(borrowed.read(), X)
    made = lent()
    lending = "from dtrain.runtime.queues.lending import Lent"
    code = f"{lending}; print(Lent.borrowed({made.told()}).read().sum())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) == X.sum()


@pytest.mark.parametrize("what", ["nobody", "closed", "file", "socket", "token"])
def test_what_is_not_the_memory_that_was_meant_is_not_opened(what, tmp_path):
    made = lent()
    told = made.told()
    if what == "nobody":
        told["pid"] = 2**22 + 1
    elif what == "closed":
        made.close()
    elif what == "file":
        (tmp_path / "x").write_bytes(bytes(1000))
        told["fd"] = os.open(tmp_path / "x", os.O_RDONLY)
    elif what == "socket":
        told["fd"], other = os.pipe()
        os.set_blocking(told["fd"], False)
        os.close(other)
    else:
        told["token"] = bytes(16)
    assert Lent.borrowed(told) is None
    if what in ("file", "socket"):
        os.close(told["fd"])


def test_who_reads_memory_that_is_lent_again_is_told():
    made = lent()
    late = Lent.borrowed(made.told())
    assert late is not None
    made.write([X[::-1].copy()[:300], X[::-1].copy()[300:500]])
    with pytest.raises(OSError, match="found other bytes"):
        late.read()
    again = Lent.borrowed(made.told())
    assert again is not None
    np.testing.assert_array_equal(again.read(), X[::-1][:500])


def test_what_comes_back_is_lent_again_and_there_are_bounds():
    lender = Lender()
    first = lender.lend([X])
    assert first is not None
    lender.keep(0, first)
    second = lender.lend([X])
    assert second is not None
    assert second is not first
    lender.keep(1, second)
    lender.back([0, 7])
    assert lender.lend([X[:50_000].copy()]) is first
    lender.keep(2, first)
    lender.back([2])
    # Not for what is much smaller, or larger.
    assert lender.lend([X[:10].copy()]) is not first
    assert lender.lend([np.zeros(200_000, np.uint8)]) is not first
    for number in range(3, 60):
        made = lender.lend([X])
        assert made is not None
        lender.keep(number, made)
    assert len(lender._out) + len(lender._free) <= 16
    large = np.zeros(1 << 24, np.uint8)
    for number in range(60, 64):
        made = lender.lend([large])
        assert made is not None
        lender.keep(number, made)
    assert sum(m.capacity for m in lender._out.values()) <= 1 << 25


def test_no_descriptor_is_left():
    before = os.listdir("/proc/self/fd")
    lender = Lender()
    for number in range(40):
        made = lender.lend([X])
        assert made is not None
        lender.keep(number, made)
        Lent.borrowed(made.told())
        if number % 3:
            lender.back([number])
    del lender, made
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_many_parts_and_empty_ones_are_one():
    parts = [X[i : i + 100] for i in range(0, 100_000, 100)]
    made = Lent.of([X[:0], *parts])
    assert made is not None
    borrowed = Lent.borrowed(made.told())
    assert borrowed is not None
    np.testing.assert_array_equal(borrowed.read(), X)


def test_parts_are_read_from_where_they_start_and_not_beyond_the_end():
    made = lent()
    borrowed = Lent.borrowed(made.told())
    assert borrowed is not None
    outs = [(5, np.zeros(100, np.uint8)), (99_000, np.zeros(1000, np.uint8))]
    borrowed.fill(outs)
    for start, out in outs:
        np.testing.assert_array_equal(out, X[start : start + out.size])
    with pytest.raises(OSError, match="found 100000 bytes of lent memory, expected 100090"):
        borrowed.fill([(99_990, np.zeros(9, np.uint8)), (99_990, np.zeros(100, np.uint8))])
    made.write([X])
    with pytest.raises(OSError, match="found other bytes"):
        borrowed.fill(outs)


def test_memory_is_lent_again_if_the_bytes_fit_in():
    first = lent_again(None, [X])
    assert first is not None
    assert lent_again(first, [X[:50_000]]) is first
    borrowed = Lent.borrowed(first.told())
    assert borrowed is not None
    np.testing.assert_array_equal(borrowed.read(), X[:50_000])
    larger = lent_again(first, [X, X])
    assert larger is not first
    assert Lent.borrowed({**borrowed.told(), "token": bytes(16)}) is None
    assert larger is not None
    assert lent_again(larger, [X[:10]]) is not larger
