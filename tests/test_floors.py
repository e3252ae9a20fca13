"""The floors of the code: a module imports only from floors below its own, or from its own.

The imports are read from the source, so nothing is imported to find out.  What stands under
``if TYPE_CHECKING`` is for the type checker and does not count; what stands inside a function
counts.  A new module has to be given a floor here.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

WORDS, NUMBERS, MACHINES, RUNTIME, FACES = range(5)

#: Module -> its floor.  A package's name stands for all that is in it.
FLOORS = {
    "dtrain._version": WORDS,
    "dtrain.errors": WORDS,
    "dtrain.config": WORDS,
    "dtrain.spec": WORDS,
    "dtrain.messages": WORDS,
    "dtrain.devices": WORDS,
    "dtrain.checks": WORDS,
    "dtrain.arrays": NUMBERS,
    "dtrain.layout": NUMBERS,
    "dtrain.partition": NUMBERS,
    "dtrain.optim": NUMBERS,
    "dtrain.schedules": NUMBERS,
    "dtrain.models": NUMBERS,
    "dtrain.tree": NUMBERS,
    "dtrain.metrics": NUMBERS,
    "dtrain.frames": NUMBERS,
    "dtrain.callbacks": NUMBERS,
    "dtrain.machines": MACHINES,
    "dtrain.runtime": RUNTIME,
    "dtrain.cluster": FACES,
    "dtrain.job": FACES,
    "dtrain.inputs": FACES,
    "dtrain.training": FACES,
    "dtrain.planning": FACES,
    "dtrain.starting": FACES,
    "dtrain.checkpoints": FACES,
    "dtrain.handle": FACES,
    "dtrain.prediction": FACES,
    "dtrain.result": FACES,
    "dtrain.sessions": FACES,
    "dtrain.sklearn": FACES,
    "dtrain.progress": FACES,
    "dtrain.watching": FACES,
    "dtrain.sources": FACES,
    "dtrain.specfile": FACES,
    "dtrain.datafiles": FACES,
    "dtrain": FACES,
}

#: All that a machine may import beside dtrain: no clock, thread, socket, file, chance or Dask.
PURE = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "numpy",
    "typing",
}

#: The ways to the environment.
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb"}

#: The cluster's libraries; words and numbers do without them.
CLUSTER = {"asyncio", "dask", "distributed", "socket", "tornado"}


@dataclass(frozen=True)
class Import:
    """``name`` is the module, or the name in a module, as far as the source tells."""

    line: int
    name: str

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only the type checker sees."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for other in child.orelse:
                yield other
                yield from statements(other)
            continue
        yield child
        yield from statements(child)


def imports(source: str, package: str = "") -> list[Import]:
    """All imports of a module, those inside functions and by constant name too.

    ``package`` is the one that the module is in, for relative imports.
    """
    found = []
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = [*parents] if node.level else []
            base += [node.module] if node.module else []
            names = [".".join([*base, alias.name]) for alias in node.names]
            found += [Import(node.lineno, name) for name in names]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.append(Import(node.lineno, str(node.args[0].value)))
    return found


def dotted(node: ast.AST) -> str | None:
    """``a.b.c`` as it is written; None for what is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)) is not None:
        return f"{base}.{node.attr}"
    return None


def attributes(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every attribute that is read by its full name."""
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Attribute) and (name := dotted(node)) is not None:
            yield node.lineno, name


def modules(package: str, folder: Path) -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join([package, *parts])] = path
    return found


DTRAIN = modules("dtrain", ROOT / "dtrain")
CLI = modules("dtrain_cli", ROOT / "cli" / "dtrain_cli")


def imports_of(module: str) -> list[Import]:
    path = {**DTRAIN, **CLI}[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return imports(path.read_text(), package)


def floor_of(module: str) -> int | None:
    """The floor of a module; a package's floor is its modules', except at the top."""
    while module != "dtrain":
        if module in FLOORS:
            return FLOORS[module]
        module = module.rpartition(".")[0]
        if module == "dtrain":
            return None
    return FLOORS["dtrain"]


def target(name: str, known: dict[str, Path] = DTRAIN) -> str | None:
    """The module of dtrain that an imported name is, or is in; None for what is not ours."""
    if name != "dtrain" and not name.startswith("dtrain."):
        return None
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return name


def too_high(module: str, found: list[Import]) -> list[str]:
    """The imports from floors above, in words."""
    own = floor_of(module)
    bad = []
    for one in found:
        there = target(one.name)
        if there is not None and own is not None and (floor_of(there) or 0) > own:
            words = f"{module}:{one.line} (floor {own}) imports {one.name} (floor"
            bad.append(f"{words} {floor_of(there)})")
    return bad


# -- the rules ---------------------------------------------------------------------------------


def test_every_module_has_a_floor_and_every_floor_a_module():
    unlisted = [module for module in DTRAIN if floor_of(module) is None]
    assert not unlisted, f"give them a floor in FLOORS: {unlisted}"
    gone = [module for module in FLOORS if module not in DTRAIN]
    assert not gone, f"no such module any more: {gone}"


@pytest.mark.parametrize("module", DTRAIN)
def test_imports_come_from_floors_below(module):
    assert too_high(module, imports_of(module)) == []


def impure(source: str, found: list[Import]) -> list[str]:
    """What a machine may not have: other imports, and chance without a seed of its own."""
    bad = [f"line {i.line}: import {i.name}" for i in found if i.top not in PURE | {"dtrain"}]
    for line, name in attributes(source):
        _, random, rest = name.partition(".random.")
        if random and rest != "default_rng":
            bad.append(f"line {line}: {name}")
    return bad


@pytest.mark.parametrize("module", [m for m in DTRAIN if floor_of(m) == MACHINES])
def test_machines_are_pure(module):
    assert impure(DTRAIN[module].read_text(), imports_of(module)) == []


@pytest.mark.parametrize("module", [m for m in DTRAIN if (floor_of(m) or 0) <= NUMBERS])
def test_words_and_numbers_know_no_cluster_and_words_no_numbers(module):
    barred = CLUSTER | ({"numpy", "cupy"} if floor_of(module) == WORDS else set())
    if module == "dtrain.config":
        barred = barred - {"dask"}
    bad = [f"line {one.line}: {one.name}" for one in imports_of(module) if one.top in barred]
    assert not bad, f"{module} imports {bad}"


def test_only_arrays_imports_cupy():
    found = {m for m in {**DTRAIN, **CLI} for one in imports_of(m) if one.top == "cupy"}
    assert found <= {"dtrain.arrays"}


def reads_of_settings(source: str, found: list[Import]) -> list[str]:
    """Reads of Dask's configuration or of the environment; ``dask.config.set`` only writes."""
    bad = [
        f"line {one.line}: {one.name}"
        for one in found
        if one.name in ENVIRONMENT
        or (one.name.startswith("dask.config.") and one.name != "dask.config.set")
    ]
    for line, name in attributes(source):
        reads = name in ENVIRONMENT
        reads |= name.startswith("dask.config.") and name != "dask.config.set"
        if reads:
            bad.append(f"line {line}: {name}")
    return bad


@pytest.mark.parametrize("module", [m for m in DTRAIN if m != "dtrain.config"])
def test_only_config_reads_the_configuration_and_the_environment(module):
    found, source = imports_of(module), DTRAIN[module].read_text()
    assert reads_of_settings(source, found) == []
    touches = any(one.name.startswith("dask.config") for one in found) or "config" in {
        one.name.rpartition(".")[2] for one in found if one.top == "dask"
    }
    # The embedded cluster sets what Dask asks of its workers; nobody else touches it.
    assert not touches or module == "dtrain.cluster"


def public_names() -> set[str]:
    """``dtrain.__all__``, as it is written."""
    for node in ast.parse(DTRAIN["dtrain"].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError("dtrain has no __all__")


def not_public(source: str, public: set[str]) -> list[str]:
    """What a module takes from dtrain that is not in its public face."""
    bad = []
    for node in statements(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dtrain."):
            names = ", ".join(alias.name for alias in node.names)
            bad.append(f"line {line}: from {node.module} import {names}")
        elif isinstance(node, ast.ImportFrom) and node.module == "dtrain":
            names = [alias.name for alias in node.names if alias.name not in public]
            bad += [f"line {line}: from dtrain import {name}" for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("dtrain.")]
            bad += [f"line {line}: import {name}" for name in names]
    for line, name in attributes(source):
        first, _, rest = name.partition(".")
        if first == "dtrain" and rest.partition(".")[0] not in public:
            bad.append(f"line {line}: {name}")
    return bad


@pytest.mark.parametrize("module", CLI)
def test_the_cli_uses_only_the_public_face(module):
    assert not_public(CLI[module].read_text(), public_names()) == []


def test_nothing_of_dtrain_imports_the_cli():
    found = [f"{m}: {one.name}" for m in DTRAIN for one in imports_of(m) if one.top == "dtrain_cli"]
    assert found == []


# -- the rules can fail ------------------------------------------------------------------------


def read(source: str, package: str = "dtrain.machines") -> list[str]:
    return [one.name for one in imports(textwrap.dedent(source), package)]


def test_imports_are_found_wherever_they_stand():
    source = """
        import time, os.path as p
        from dtrain.errors import FencedError as F
        from . import ledger
        from .rounds import Rounds
        from ..errors import DataError
        if TYPE_CHECKING:
            import asyncio
        else:
            import threading
        def f():
            import socket
            try:
                import importlib
                importlib.import_module("random")
            except ImportError:
                from distributed import Client
    """
    assert read(source) == [
        "time",
        "os.path",
        "dtrain.errors.FencedError",
        "dtrain.machines.ledger",
        "dtrain.machines.rounds.Rounds",
        "dtrain.errors.DataError",
        "threading",
        "socket",
        "importlib",
        "random",
        "distributed.Client",
    ]


@pytest.mark.parametrize(
    ("module", "source", "caught"),
    [
        ("dtrain.machines.rounds", "from dtrain.runtime.lead import SyncLead", True),
        ("dtrain.machines.rounds", "from dtrain import runtime", True),
        ("dtrain.machines.rounds", "from dtrain import fit", True),
        ("dtrain.machines.rounds", "import dtrain", True),
        ("dtrain.machines.rounds", "def f():\n    from dtrain.result import load", True),
        ("dtrain.machines.rounds", "from dtrain.tree import tree_sum", False),
        ("dtrain.machines.rounds", "from dtrain.machines.ledger import Ledger", False),
        ("dtrain.machines.rounds", "from dtrain import errors", False),
        ("dtrain.spec", "from dtrain.models import build", True),
        ("dtrain.optim", "from dtrain.machines import cursor", True),
        ("dtrain.runtime.master", "from dtrain.cluster import connect", True),
        ("dtrain.runtime.master", "if TYPE_CHECKING:\n    from dtrain.cluster import x", False),
        ("dtrain.training", "from dtrain.handle import Handle", False),
    ],
)
def test_an_import_from_above_is_caught(module, source, caught):
    assert bool(too_high(module, imports(source))) == caught


@pytest.mark.parametrize(
    "source",
    [
        *(f"import {name}" for name in ("time", "asyncio", "threading", "socket", "os", "io")),
        *(f"import {name}" for name in ("random", "dask", "distributed", "datetime", "logging")),
        "from pathlib import Path",
        "def f():\n    from time import monotonic",
        "import numpy as np\nnp.random.rand()",
        "import numpy as np\nnp.random.seed(0)",
    ],
)
def test_an_impure_machine_is_caught(source):
    assert impure(source, imports(source))
    assert not impure("np.random.default_rng([seed, 1]).permutation(3)", [])


def test_an_unknown_module_has_no_floor():
    assert floor_of("dtrain.newcomer") is None
    assert floor_of("dtrain.machines.newcomer") == MACHINES
    assert floor_of("dtrain") == FACES


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("from dtrain.errors import SpecError", True),
        ("import dtrain.errors", True),
        ("from dtrain import runtime", True),
        ("import dtrain\ndtrain.cluster.Control", True),
        ("import dtrain\ndtrain.SpecError", False),
        ("from dtrain import fit, __version__", False),
    ],
)
def test_a_cli_that_looks_inside_is_caught(source, caught):
    assert bool(not_public(source, public_names())) == caught


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("import os\nos.environ['X']", True),
        ("import os\nos.getenv('X')", True),
        ("from os import environ", True),
        ("import dask\ndask.config.get('x')", True),
        ("from dask.config import get", True),
        ("import dask.config\ndask.config.set({})", False),
        ("import os\nos.sched_yield()", False),
    ],
)
def test_a_read_of_the_settings_is_caught(source, caught):
    assert bool(reads_of_settings(source, imports(source))) == caught
