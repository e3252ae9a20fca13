"""``python -m benchmarks COMMAND``, from the root of the repository."""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks import environment

#: Name -> its module, which has ``HELP: str``, ``arguments(parser)``, ``run(args)``, a dict of
#: plain values, and ``tables(found)``, what is to be shown of that.
COMMANDS = {
    "sync": "benchmarks.sync",
    "async": "benchmarks.asynchronous",
    "transport": "benchmarks.transport",
    "ingraph": "benchmarks.ingraph",
    "straggler": "benchmarks.straggler",
    "master": "benchmarks.master",
    "recovery": "benchmarks.recovery",
    "goodput": "benchmarks.goodput",
    "soak": "benchmarks.soak",
    "saving": "benchmarks.saving",
    "queues": "benchmarks.queues",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; the environment is settled already, so NumPy may be loaded now."""
    from benchmarks import report

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="How fast dtrain is, beside plain code that does the same work.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, home in COMMANDS.items():
        module = importlib.import_module(home)
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.arguments(command)
        command.add_argument(
            "--json", action="store_true", help="one JSON object on stdout, the tables on stderr"
        )
        command.set_defaults(module=module)
    args = parser.parse_args(argv)
    about = report.about(args.command)
    found = {**about, **args.module.run(args)}
    report.show(found, args.module.tables(found), as_json=args.json)
    return 0


if __name__ == "__main__":
    environment.settle()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
