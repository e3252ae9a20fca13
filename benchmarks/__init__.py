"""How fast dtrain is, beside plain code that does the same work in the same run.

``python -m benchmarks --help`` from the root of the repository.
"""
