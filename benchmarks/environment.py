"""The environment that every measured process is started in; imports nothing heavy.

BLAS reads its variables when it is loaded.  So they are settled before NumPy is, in the process
that starts all the others.
"""

from __future__ import annotations

import json
import os
import sys

#: Makes BLAS believe in another processor or cache: slow on some machines, and not on all sides
#: alike, since Dask starts its workers in an environment of its own.
UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")

#: One BLAS thread in each process.
SET = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")

#: Remembers over a re-exec what was unset.
_REMEMBER = "DTRAIN_BENCHMARKS_UNSET"


def settle() -> None:
    """Set and unset the variables; start this command over if NumPy was loaded before."""
    found = {name: os.environ.pop(name) for name in UNSET if name in os.environ}
    changed = bool(found) or any(os.environ.get(name) != value for name, value in SET.items())
    os.environ.update(SET)
    os.environ[_REMEMBER] = json.dumps({**unset(), **found})
    if changed and "numpy" in sys.modules:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def unset() -> dict[str, str]:
    """The variables that were unset, and what they were."""
    known: dict[str, str] = json.loads(os.environ.get(_REMEMBER, "{}"))
    return known


def check() -> None:
    """Raise RuntimeError in a process that was not started in the settled environment."""
    wrong = {name: os.environ[name] for name in UNSET if name in os.environ}
    wrong |= {n: os.environ.get(n, "") for n, v in SET.items() if os.environ.get(n) != v}
    if wrong:
        raise RuntimeError(f"environment: found {wrong}, expected {SET} and no {UNSET}")
