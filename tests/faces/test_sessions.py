"""Sessions from outside: from Python and from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from distributed import Client, LocalCluster
from typer.testing import CliRunner

import dtrain
from dtrain.models import MLP


@pytest.fixture(scope="module")
def served() -> Iterator[Client]:
    """Two workers in this process, and a scheduler that the command line can reach."""
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            dashboard_address=None,
            protocol="tcp",
            host="127.0.0.1",
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def ctr(served: Client) -> Iterator[dtrain.Session]:
    with dtrain.Session("ctr [1]", client=served) as session:
        session.create(
            MLP([4, 3]), optimizer=dtrain.optim.adam(), partitioner=dtrain.FixedShards(2)
        )
        yield session
        session.reset()


def dt(client: Client, *args: str):
    from dtrain_cli.main import app

    return CliRunner().invoke(app, ["sessions", *args, "--scheduler", client.scheduler.address])


def test_list_has_each_session_on_a_line(ctr, served):
    result = dt(served, "list")
    assert result.exit_code == 0
    heading, line = result.stdout.splitlines()
    assert heading.split() == ["NAME", "STATE", "CLIENTS", "WORKERS", "BYTES", "QUEUES"]
    assert line.split() == ["ctr", "[1]", "READY", "1", "2", "128", "0"]
    found = json.loads(dt(served, "list", "--json").stdout)["sessions"]
    assert found == dtrain.sessions.find(served)


def test_list_where_there_are_none(served):
    result = dt(served, "list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no sessions" in result.stderr
    assert json.loads(dt(served, "list", "--json").stdout) == {"sessions": []}


def test_a_session_of_queues_alone_is_there_too(served):
    with dtrain.Session("logs", client=served) as session:
        session.queue("lines", 8)
        session.reader("rows", np.zeros((4, 2)))
        _, line = dt(served, "list").stdout.splitlines()
        assert line.split() == ["logs", "EMPTY", "0", "0", "0", "2"]
        (found,) = dtrain.sessions.find(served)
        assert (found["spec"], found["hosts"], found["queues"]) == (None, [], 2)
        shown = dtrain.sessions.show("logs", served)
        assert [(q["kind"], q["name"]) for q in shown["queues"]] == [
            ("queue", "lines"),
            ("reader", "rows"),
        ]
        assert (shown["variables"], shown["shards"]) == ([], {})
        assert shown["since"] == found["since"] > 1e9
        words = dt(served, "show", "logs").stdout
        assert "EMPTY" in words
        assert "lines" in words
        assert dt(served, "reset", "logs").exit_code == 0
        assert dtrain.sessions.find(served) == []
        with pytest.raises(dtrain.SessionNotFound):
            dtrain.sessions.show("logs", served)


def test_show_has_the_variables_and_what_they_have_had(ctr, served):
    snap = ctr.pull()
    grads = {n: np.ones_like(p) for n, p in snap.params.items()}
    for _ in range(3):
        ctr.push(grads, version=snap.version)
    keeper = ctr.queue("experience", 4).place.host
    result = dt(served, "show", "ctr [1]")
    assert result.exit_code == 0
    words = result.stdout.split()
    for word in (
        "READY",
        "MLP(layers=[4,",
        "adam(",
        *snap.params,
        *map(str, hosts(ctr)),
        "experience",
    ):
        assert any(word in w for w in words), word
    found = json.loads(dt(served, "show", "ctr [1]", "--json").stdout)
    assert found["state"] == "READY"
    assert {(v["name"], v["shard"], v["worker"]) for v in found["variables"]} == {
        (v["name"], v["shard"], v["worker"]) for v in ctr.variables()
    }
    queue = {"kind": "queue", "name": "experience", "worker": keeper, "made": 1, "handles": 1}
    assert found["queues"] == [queue]
    for shard in found["shards"].values():
        assert (shard["version"], shard["pushes"], shard["duplicates"]) == (3, 3, 0)
        assert shard["staleness"] == {"0": 1, "1": 1, "2": 1}
    assert [e["state"] for e in found["events"]] == ["EMPTY", "CREATING", "READY"]


def hosts(session: dtrain.Session) -> set[str]:
    return {v["worker"] for v in session.variables()}


def test_looking_is_not_attaching(ctr, served):
    for _ in range(2):
        assert dtrain.sessions.show("ctr [1]", served)["clients"] == 1


def test_reset_ends_it(ctr, served):
    result = dt(served, "reset", "ctr [1]", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"name": "ctr [1]", "reset": True})
    with pytest.raises(dtrain.FencedError, match="ended"):
        ctr.pull()
    assert ctr.create(MLP([4, 2]), optimizer=dtrain.optim.sgd(1.0)).pull().version == 0


@pytest.mark.parametrize("verb", ["show", "reset"])
def test_a_session_that_is_not_there_is_refused(served, verb):
    with dtrain.Session("other", client=served):
        result = dt(served, verb, "nothing", "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "SessionNotFound"
    assert "session 'nothing': not on this cluster" in error["message"]


@pytest.mark.parametrize("name", ["\x1b[31mred\x1b[0m", "\x9b2J", "[/bold]", "<b>", "a\rb"])
def test_a_name_is_shown_and_never_obeyed(served, name):
    with dtrain.Session(name, client=served) as s:
        s.create(MLP([4, 3]), optimizer=dtrain.optim.adam())
        s.queue(name, 4)
        shown = name if name.isprintable() else ascii(name)[1:-1]
        told = [dt(served, "list"), dt(served, "show", name), dt(served, "show", f"no {name}")]
        told.append(dt(served, "reset", name))
    assert [result.exit_code for result in told] == [0, 0, 2, 0]
    for result in told:
        assert shown in result.output
        assert all(c.isprintable() or c == "\n" for c in result.output)
    assert dtrain.sessions.find(served) == []
