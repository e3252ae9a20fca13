"""How fast dtrain is, beside other code that does the same work in the same run.

From the root of the repository::

    python -m benchmarks sync                                       # all models, some minutes
    python -m benchmarks sync --model small --where --json > small.json
    python -m benchmarks sync --peers --tensorflow /venvs/tf/bin/python
    python -m benchmarks async --slow 4
    python -m benchmarks transport
    python -m benchmarks master

A new command is a module and a line in ``benchmarks.__main__.COMMANDS``.
"""
