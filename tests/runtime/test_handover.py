"""Shards that are taken over from other processes: which of their versions is the committed one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

import dtrain
from dtrain.errors import ProtocolError
from dtrain.layout import Layout
from dtrain.partition import partition
from dtrain.runtime import handover
from dtrain.runtime.updater import cut

LAYOUT = Layout.of({"a": np.zeros(16, np.float32), "b": np.zeros(16, np.float32)})
SHARDS = partition(LAYOUT, 2)


def gathered(monkeypatch, *, passed_over, flips=False):
    """Shard 0, the lead's, is at version 5; shard 1 is at 4, and has an update ready."""
    asked = []

    def call(host, address, op, generation, **message):
        number = {"tcp://a": 0, "tcp://b": 1}[address]
        if op == "dtrain_report":
            return {
                "layout": LAYOUT.to_dict(),
                "versions": {str(number): 5 - number},
                "passed_over": [4] if passed_over and number == 0 else [],
                "account": None,
                "cursor": None,
            }
        asked.append((message["shard"], message["version"]))
        if flips and message["version"] == 4:
            raise ProtocolError("version 4 is wanted, found 5")
        flat = [np.full(16, 10 * number + message["version"], np.float32)]
        return {"version": message["version"], "params": flat, "slots": {}}

    monkeypatch.setattr(handover, "_call", call)
    hosts = [
        SimpleNamespace(address="tcp://a", shards=(0,)),
        SimpleNamespace(address="tcp://b", shards=(1,)),
    ]
    host = SimpleNamespace(
        layout=LAYOUT, shard_plan=SHARDS, optimizer=dtrain.optim.sgd(0.1), synchronous=True,
        generation=1, launch=SimpleNamespace(hosts=hosts),
    )  # fmt: skip
    state = handover.running(host)
    assert state.step == 5
    return asked, [float(cut(state.params, shard.ranges)[0][0]) for shard in SHARDS.shards]


def test_a_step_that_is_decided_is_finished(monkeypatch):
    assert gathered(monkeypatch, passed_over=False) == ([(0, 5), (1, 5)], [5.0, 15.0])


def test_of_a_step_that_is_passed_over_nothing_is_taken(monkeypatch):
    """The update that a shard has ready is one of those that must not be."""
    assert gathered(monkeypatch, passed_over=True) == ([(0, 5), (1, 4)], [5.0, 14.0])


def test_a_shard_that_has_heard_of_it_meanwhile(monkeypatch):
    asked, found = gathered(monkeypatch, passed_over=True, flips=True)
    assert asked == [(0, 5), (1, 4), (1, 5)]
    assert found == [5.0, 15.0]
