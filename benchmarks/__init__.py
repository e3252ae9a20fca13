"""How fast dtrain is, beside plain code that does the same work in the same run.

From the root of the repository::

    python -m benchmarks sync                                       # all models, some minutes
    python -m benchmarks sync --model small --where --json > small.json

A new command is a module and a line in ``benchmarks.__main__.COMMANDS``.
"""
