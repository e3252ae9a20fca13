"""Machine, medians, ratios, and how they are shown."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from rich.console import Console, RenderableType
from rich.table import Table
from threadpoolctl import threadpool_info

from benchmarks import environment


@dataclass(frozen=True)
class Turn:
    """One measurement of one side.

    Attributes
    ----------
    rate : float
        Samples/s, or what else the command counts.
    parts : list of float
        What it was made of: the rate of each process, or of each epoch.
    """

    rate: float
    parts: list[float]


def interleaved(
    sides: Mapping[str, Callable[[], Turn]],
    rounds: int,
    said: Callable[[str], None],
    unit: str = "samples/s",
) -> dict[str, list[Turn]]:
    """``rounds`` turns of each side: A B C, A B C, and so on; other work on the machine and
    its changes of speed then fall on all of them."""
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, measure in sides.items():
            turn = measure()
            turns[name].append(turn)
            said(f"round {number + 1} of {rounds}: {name} {turn.rate:,.0f} {unit}")
    return turns


def summary(
    turns: Mapping[str, Sequence[Turn]], ratios: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """Plain values: the raw rates, their medians, and ratios of medians.

    ``ratios``: name -> the side above and the side below the line; left out where one of them
    was not measured.
    """
    rates = {name: [turn.rate for turn in of] for name, of in turns.items()}
    medians = {name: median(of) for name, of in rates.items()}
    return {
        "rates": rates,
        "parts": {name: [turn.parts for turn in of] for name, of in turns.items()},
        "medians": medians,
        "ratios": {
            name: medians[a] / medians[b]
            for name, (a, b) in ratios.items()
            if a in medians and b in medians
        },
    }


def parts(
    *, step: np.ndarray, gradients: np.ndarray, own: np.ndarray, waiting: np.ndarray
) -> dict[str, float]:
    """The medians of the parts of many steps; all in milliseconds."""
    named = {"step": step, "gradients": gradients, "own work": own, "waiting": waiting}
    return {name: float(np.median(values)) for name, values in named.items()}


# -- where it was measured -----------------------------------------------------------------------


def about(command: str) -> dict[str, Any]:
    """When, on which machine, with which versions, in which environment."""
    import dask
    import distributed

    import dtrain

    modules = (dtrain, np, dask, distributed)
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in modules},
        },
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "load": os.getloadavg()[0],
        },
        "environment": {"set": environment.SET, "unset": environment.unset()},
    }


def blas() -> list[dict[str, Any]]:
    """What BLAS this process has loaded, of which kernels and threads."""
    kept = ("internal_api", "version", "architecture", "num_threads")
    return [
        {key: pool.get(key) for key in kept}
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    ]


def cores_of(pids: Iterable[int], seconds: float = 1.0) -> float:
    """How many cores these processes use now."""
    processes = [psutil.Process(pid) for pid in pids]

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before, began = used(), time.perf_counter()
    time.sleep(seconds)
    return (used() - before) / (time.perf_counter() - began)


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The checkout's commit, with ``+`` if files differ from it; None outside a checkout."""
    root = Path(__file__).parents[1]
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changes else "")


# -- output --------------------------------------------------------------------------------------


def show(found: Mapping[str, Any], tables: Iterable[RenderableType], *, as_json: bool) -> None:
    """Tables on stdout; or one JSON object there, and the tables on stderr."""
    console = Console(stderr=as_json, highlight=False, markup=False)
    for item in (*_where(found), *tables):
        console.print(item)
    if as_json:
        print(json.dumps(found, indent=2))


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def _where(found: Mapping[str, Any]) -> list[str]:
    machine, versions = found["machine"], found["versions"]
    settled = found["environment"]
    gone = ", ".join(f"{name} (was {value})" for name, value in settled["unset"].items())
    lines = [
        f"{found['command']}, {found['date']}, commit {found['commit'] or 'unknown'}",
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.2f} at the start",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"on all sides: {' '.join(f'{n}={v}' for n, v in settled['set'].items())}; "
        f"unset: {gone or ', '.join(environment.UNSET) + ' (were not set)'}",
    ]
    for words, names in _grouped(found.get("blas", {})).items():
        lines.append(f"{words}: {', '.join(names)}")
    for name, about in found.get("peers", {}).items():
        known = [f"{key} {value}" for key, value in about.items() if isinstance(value, str)]
        lines.append(f"{name}: {', '.join(known)}, with the maths it brings along")
    if len(_grouped(found.get("blas", {}))) > 1:
        lines.append("WARNING: not all sides have the same BLAS; their rates do not compare")
    return lines


def _grouped(of: Mapping[str, list[dict[str, Any]]]) -> dict[str, list[str]]:
    """What BLAS, in words -> the processes that have it."""
    grouped: dict[str, list[str]] = {}
    for name, pools in of.items():
        words = " and ".join(
            f"{p['internal_api']} {p['version']} {p['architecture']}, {p['num_threads']} thread(s)"
            for p in pools
        )
        grouped.setdefault(words or "no BLAS found", []).append(name)
    return grouped


def rates_table(workloads: Sequence[Mapping[str, Any]]) -> Table:
    """A column for each workload: medians of samples/s, then their ratios."""
    table = Table()
    table.add_column("samples/s")
    for workload in workloads:
        table.add_column(workload["name"], justify="right")
    for key, style in (("medians", ",.0f"), ("ratios", ".2f")):
        for name in workloads[0][key]:
            table.add_row(name, *(format(workload[key][name], style) for workload in workloads))
        table.add_section()
    return table
