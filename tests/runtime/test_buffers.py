"""Memory that is used again once nobody has it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dtrain.arrays import ALIGNMENT, address
from dtrain.runtime.buffers import Buffers, room

N = 1 << 20


@pytest.mark.parametrize("nbytes", [1, 100, N, N + 7])
def test_it_is_aligned_and_of_that_length(nbytes):
    for found in (room(nbytes), Buffers().room(nbytes), Buffers().room(nbytes)):
        assert found.dtype == np.uint8
        assert found.shape == (nbytes,)
        assert address(found) % ALIGNMENT == 0
        assert found.flags.writeable


@pytest.mark.parametrize(
    "keeping",
    [
        lambda a: a,
        lambda a: a[5:9],
        lambda a: a[64:128].view("f4").reshape(4, 4)[1],
        lambda a: memoryview(a),
        lambda a: np.frombuffer(a[10:20].data, np.uint8),
        lambda a: [{"deep": a[3:]}],
    ],
)
def test_what_somebody_has_is_not_handed_out_again(keeping):
    buffers = Buffers()
    first = address(whole := buffers.room(N))
    kept = keeping(whole)
    del whole
    other = buffers.room(N)
    assert address(other) != first
    del kept
    assert address(buffers.room(N)) == first


def test_what_is_much_smaller_or_larger_takes_other_memory_and_there_are_bounds():
    buffers = Buffers()
    buffers.room(N)
    buffers.room(N // 8)
    buffers.room(N * 2)
    assert [whole.size - ALIGNMENT for whole in buffers._kept] == [N, N // 8, 2 * N]
    held = [buffers.room(N) for _ in range(40)]
    assert len(buffers._kept) <= 16
    large = [buffers.room(20 * N) for _ in range(5)]
    assert sum(whole.size for whole in buffers._kept) <= 1 << 26
    buffers.room(1 << 27)
    assert buffers._kept
    for one in (*held, *large):
        one[:] = 1


def test_threads_never_have_the_same_memory():
    buffers, wrong = Buffers(), []

    def use(number: int) -> None:
        for _ in range(200):
            mine = buffers.room(N // 8)
            mine[:] = number
            if (mine != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
