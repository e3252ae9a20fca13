"""The lines of the documentation run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import dtrain

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

#: The pages whose lines are a program: each block, in the order of the page.
PAGES = ["questions.md", "sessions.md", "queues.md", "data.md"]

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def lines(text: str) -> str:
    """The Python of a page, each line where it stands there."""
    found = [""] * len(text.splitlines())
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for number, line in enumerate(block.group(1).splitlines()):
            found[first + number] = line
    return "\n".join(found)


def run(page: str, text: str, client: Client | None) -> dict[str, Any]:
    """Run the Python of a page; what its names are then."""
    names = {"client": client, "__name__": "page"}
    exec(compile(lines(text), page, "exec"), names)
    return names


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Of two workers; what a page writes goes to a folder of its own."""
    monkeypatch.chdir(tmp_path)
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster) as found,
    ):
        yield found


@pytest.mark.parametrize("page", PAGES)
def test_a_page(page, client, monkeypatch):
    if page == "data.md":
        pytest.importorskip("pandas", reason="pandas is not installed (the extra dataframe)")
    failed: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failed.append(args.exc_value))
    text = (DOCS / page).read_text()
    assert text.count("```python") == len(_BLOCK.findall(text)) > 0
    run(page, text, client)
    assert failed == []  # what it starts in threads is to succeed as well
    assert dtrain.sessions.find(client) == []


SMALL = """# A page
```python
a = [1]
```
```console
rm -r /
```
And then:
```python
if a:
    b = a + [2]
```
"""


def test_a_broken_block_is_seen_where_it_stands():
    assert run("small", SMALL, None)["b"] == [1, 2]
    for whole, broken, line in (("a = [1]", "a = [1 / 0]", 3), ("[2]", "[2 / 0]", 11)):
        with pytest.raises(ZeroDivisionError) as caught:
            run("small", SMALL.replace(whole, broken), None)
        where = traceback.extract_tb(caught.value.__traceback__)[-1]
        assert (where.filename, where.lineno) == ("small", line)


def test_each_question_has_a_line_that_runs():
    """Four of each of the two lists, and the four ways of replication under the third."""
    text = (DOCS / "questions.md").read_text()
    tasks, sessions = re.split("^# .*$", text, flags=re.MULTILINE)[-2:]
    for part in (tasks, sessions):
        questions = re.split("^## ", part, flags=re.MULTILINE)[1:]
        assert len(questions) == 4
        assert all(question.splitlines()[0].endswith("?") for question in questions)
        assert all("```python" in question for question in questions)
    ways = re.split("^### ", tasks, flags=re.MULTILINE)[1:]
    assert sorted(way.splitlines()[0].lower() for way in ways) == sorted(
        f"{graph}, {mode}"
        for graph in ("in-graph", "between-graph")
        for mode in ("synchronous", "asynchronous")
    )
    assert all("```python" in way for way in ways)


@pytest.mark.cluster
def test_the_calculation_server_converges():
    script = ROOT / "examples" / "calculation_server.py"
    ran = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"^mean reward 0\.9\d after \d+ steps", ran.stdout, re.MULTILINE)
