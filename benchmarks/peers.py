"""Other systems that train the same models on the same rows, where they are asked for."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Protocol

from benchmarks.ddp import Ddp
from benchmarks.parameter_server import Missing, ParameterServer
from benchmarks.report import Turn, say
from benchmarks.workloads import Workload


class Peer(Protocol):
    """A peer that is up."""

    name: str
    #: its versions and its BLAS
    about: dict[str, Any]

    def turn(self, workload: Workload, seconds: float) -> Turn:
        """Samples/s, of all its processes together."""

    def pids(self) -> Iterable[int]:
        """Its processes."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", action="store_true", help="beside PyTorch DDP and TensorFlow, where they are"
    )
    parser.add_argument(
        "--tensorflow",
        type=_program,
        metavar="PYTHON",
        help="the Python of a virtual environment with TensorFlow; implies --peers",
    )


def _program(text: str) -> str:
    found = shutil.which(os.path.expanduser(text))
    if found is None:
        raise argparse.ArgumentTypeError(f"found {text}, expected a Python program")
    return os.path.abspath(found)


def opened(args: argparse.Namespace, stack: ExitStack) -> tuple[list[Peer], list[str]]:
    """The peers, up until ``stack`` closes; and in words which are left out."""
    if not (args.peers or args.tensorflow):
        return [], []
    up: list[Peer] = []
    out: list[str] = []
    if importlib.util.find_spec("torch") is None:
        out.append("ddp: left out; PyTorch is not installed here.")
    else:
        up.append(stack.enter_context(Ddp()))
    if args.tensorflow is None:
        out.append("tf: left out; --tensorflow names no Python that has it.")
    else:
        try:
            up.append(stack.enter_context(ParameterServer(args.tensorflow)))
        except Missing as error:
            out.append(f"tf: left out; {error}.")
    for line in out:
        say(line)
    return up, out
