"""Spec files: a TOML file in, a :class:`dtrain.Job` out.

What is wrong with a file is told in one form: the file, the dotted key, what was found and what
was expected.  Paths and modules are relative to the file's folder, so that a folder with a spec,
its data and its code can be moved as one.
"""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import cloudpickle
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dtrain.callbacks import EarlyStopping
from dtrain.checks import did_you_mean
from dtrain.datafiles import Unreadable, Wanted, read
from dtrain.errors import DataError, SpecError
from dtrain.frames import is_frame, is_series

if TYPE_CHECKING:
    from dtrain import Job

_FACTORY = '"package.module:function"'
_FILES = "the path of a npz, npy, parquet, csv or zarr file"


# --- What a file may hold.  Each description completes "expected ...".


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Kind(_Table):
    """A kind, and the arguments of that kind as further keys."""

    model_config = ConfigDict(extra="allow")
    kind: str = Field(description='the name of a built-in, like "mlp" or "adam"')

    @property
    def args(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class _Data(_Table):
    path: str | None = Field(None, description=f"{_FILES}")
    factory: str | None = Field(None, description=f"{_FACTORY} that returns (X, y), or (X, y, w)")
    args: dict[str, Any] = Field({}, description="a table of arguments for the factory")
    target: str | int | None = Field(
        None, description="the name of an array or a column, or the index of a column (npy)"
    )
    sample_weight: str | int | None = Field(
        None, description="the name of an array or a column, or the index of a column (npy)"
    )
    features: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[int], Field(min_length=1)]
        | None
    ) = Field(
        None,
        description="the name of an array or a column, a list of names, or a list of column "
        "indices (npy)",
    )
    validation: Annotated[float, Field(gt=0, lt=1)] | str | None = Field(
        None, description=f"a fraction between 0 and 1, or {_FILES}"
    )


_Count = Annotated[int, Field(ge=1)]
_COUNT = "a whole number from 1 up"


class _Train(_Table):
    epochs: _Count | None = Field(None, description=_COUNT)
    steps: _Count | None = Field(None, description=_COUNT)
    batch_size: _Count | None = Field(None, description=_COUNT)
    replicas: _Count | None = Field(None, description=_COUNT)
    shards: _Count | None = Field(None, description=_COUNT)
    partitioner: _Kind | None = Field(
        None, description='a table with a kind, like { kind = "max_size", bytes = "4MB" }'
    )
    placement: Literal["greedy", "round-robin"] | None = Field(
        None, description='"greedy" or "round-robin"'
    )
    device: str | None = Field(None, description="'cpu', 'cuda', 'cuda:<number>' or 'auto'")
    mode: Literal["sync", "async"] = Field("sync", description='"sync" or "async"')
    backups: Annotated[int, Field(ge=0)] | None = Field(
        None, description="a whole number from 0 up, with mode sync"
    )
    max_staleness: Annotated[int, Field(ge=0)] | None = Field(
        None, description="a whole number from 0 up, with mode async"
    )
    replication: Literal["between-graph", "in-graph"] | None = Field(
        None, description='"between-graph" or "in-graph"'
    )
    optimizer: _Kind | None = Field(
        None, description='a table with a kind, like { kind = "adam", lr = 1e-3 }'
    )
    shuffle: bool | None = Field(None, description="true or false")
    seed: Annotated[int, Field(ge=0)] | None = Field(None, description="a whole number from 0 up")
    metrics: list[str] | None = Field(None, description='a list of names, like ["accuracy"]')


class _Checkpoint(_Table):
    dir: str = Field(description="the path of a folder that all workers see, or a URL of fsspec")
    every: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0)] | str = Field(
        "30s", description='a time like "30s" or 30.0 (seconds), or a whole number of steps'
    )
    keep: _Count = Field(3, description=_COUNT)
    resume: bool = Field(False, description="true or false")


class _Recovery(_Table):
    max_losses: Annotated[int, Field(ge=0)] = Field(10, description="a whole number from 0 up")
    min_workers: _Count = Field(1, description=_COUNT)
    deadline: Annotated[float, Field(gt=0)] | str = Field(
        "10min", description='a time like "10min", or a number of seconds'
    )
    on_non_finite: Literal["fail", "skip"] = Field("fail", description='"fail" or "skip"')


class _EarlyStopping(_Table):
    kind: Literal["early_stopping"] = Field(description='"early_stopping"')
    monitor: str = Field("val_loss", description="the name of a value of the epochs")
    patience: Annotated[int, Field(ge=0)] = Field(2, description="a whole number from 0 up")
    min_delta: Annotated[float, Field(ge=0)] = Field(0.0, description="a number from 0 up")
    restore_best: bool = Field(True, description="true or false")
    mode: Literal["auto", "min", "max"] = Field("auto", description='"auto", "min" or "max"')


class _File(_Table):
    name: str | None = Field(None, description="a label")
    output: str | None = Field(None, description="the path of a folder for the saved model")
    model: _Kind = Field(description="a table [model] with a kind")
    data: _Data = Field(description="a table [data] with a path or a factory")
    train: _Train = Field(_Train.model_validate({}), description="a table [train]")
    checkpoint: _Checkpoint | None = Field(None, description="a table [checkpoint] with a dir")
    recovery: _Recovery | None = Field(None, description="a table [recovery]")
    callbacks: list[_EarlyStopping] = Field(
        [], description='tables [[callbacks]] with kind = "early_stopping"'
    )


#: The keys of a table [train] that are not a job's own fields.
_NOT_AS_IS = {"mode", "backups", "max_staleness", "optimizer", "partitioner", "metrics"}


# --- The public function.


def load_job(path: str | Path, *, name: str | None = None, output: str | Path | None = None) -> Job:
    """Read a TOML spec file, its data and its model, and make the job that it describes.

    Its folder becomes importable, and the modules loaded from there travel to the workers by
    value, so that these need not have them.

    Parameters
    ----------
    path : str or Path
        The TOML file.
    name, output : str or Path, optional
        Take the place of the file's own keys.  This ``output`` is relative to the current folder,
        the file's is relative to the file.

    Raises
    ------
    SpecError
        Something in the file, or something that it names, cannot be; also when code of the user
        that the file names raises.
    DataError
        Arrays do not fit each other.
    """
    spec = _Reader(Path(path).expanduser().absolute())
    document = spec.parse()
    try:
        file = _File.model_validate(document)
    except ValidationError as error:
        raise SpecError("\n".join(_problems(error, document, spec.path))) from None
    spec.make_importable()

    X, y, *weights = spec.training_data(file.data)
    model = spec.model(file.model)
    train = file.train
    chosen = train.model_dump(exclude=_NOT_AS_IS, exclude_none=True)
    if weights:
        chosen["sample_weight"] = weights[0]
    if train.metrics is not None:
        chosen["metrics"] = tuple(train.metrics)
    if train.optimizer is not None:
        chosen["optimizer"] = spec.optimizer(train.optimizer)
    if train.partitioner is not None:
        chosen["partitioner"] = spec.partitioner(train.partitioner)
    if isinstance(file.data.validation, str):
        chosen["validation_data"] = spec.validation_data(file.data, X)
    elif file.data.validation is not None:
        chosen["validation_split"] = file.data.validation
    if output is not None:
        chosen["output"] = str(Path(output).expanduser().absolute())
    elif file.output is not None:
        chosen["output"] = str(spec.resolve(file.output))
    if file.checkpoint is not None:
        chosen["checkpoint"] = spec.checkpoint(file.checkpoint)
        chosen["resume"] = file.checkpoint.resume
    if file.recovery is not None:
        chosen["recovery"] = spec.recovery(file.recovery)
    if file.callbacks:
        chosen["callbacks"] = [
            EarlyStopping(**policy.model_dump(exclude={"kind"})) for policy in file.callbacks
        ]
    chosen["name"] = name if name is not None else file.name
    spec.let_modules_travel()

    from dtrain import Job

    mode = spec.mode(train)
    try:
        return Job(model, X, y, mode=mode, **chosen)
    except (SpecError, DataError) as error:
        raise _located(error, spec.path) from error


# --- One file, and what it names.


@dataclass(frozen=True)
class _Reader:
    """Reads what one spec file names; makes the errors that name the file and the key."""

    path: Path

    def error(self, key: str, text: str) -> SpecError:
        return SpecError(f"{self.path}: {key}: {text}")

    def resolve(self, text: str) -> Path:
        return self.path.parent / Path(text).expanduser()

    def parse(self) -> dict[str, Any]:
        if self.path.suffix != ".toml":
            raise SpecError(f"{self.path}: expected a TOML file, with a name that ends in .toml")
        try:
            return tomllib.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SpecError(f"{self.path}: there is no such file") from None
        except OSError as error:
            raise SpecError(f"{self.path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise SpecError(f"{self.path}: is not UTF-8 text, as TOML must be") from None
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"{self.path}: is not valid TOML: {error}") from None

    def make_importable(self) -> None:
        folder = str(self.path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        importlib.invalidate_caches()

    def let_modules_travel(self) -> None:
        """Workers elsewhere do not have this folder: pickle its modules by value."""
        folder = self.path.parent.resolve()
        for name, module in list(sys.modules.items()):
            if "." in name or name in ("__main__", "dtrain", "dtrain_cli"):
                continue  # cloudpickle covers the modules in a package with the package
            places = [Path(place) for place in getattr(module, "__path__", ())]
            file = getattr(module, "__file__", None)
            if any(place.parent.resolve() == folder for place in places) or (
                not places and file is not None and Path(file).parent.resolve() == folder
            ):
                cloudpickle.register_pickle_by_value(module)

    def call(self, key: str, reference: str, args: Mapping[str, Any]) -> Any:
        """What the user's ``package.module:function`` returns."""
        module_name, _, attribute = reference.partition(":")
        if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
            raise self.error(key, f"found {reference!r}, expected {_FACTORY}")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):
                raise self._user_error(key, f"importing {module_name!r}", error) from error
            raise self.error(
                key,
                f"found {reference!r}, but there is no module {error.name!r} in "
                f"{self.path.parent} or where Python looks for modules",
            ) from None
        except Exception as error:
            raise self._user_error(key, f"importing {module_name!r}", error) from error
        function = getattr(module, attribute, None)
        if not callable(function):
            raise self.error(
                key,
                f"found {reference!r}, but the module {module_name!r} "
                f"({getattr(module, '__file__', None) or 'built in'}) has no function "
                f"{attribute!r}{did_you_mean(attribute, vars(module))}",
            )
        try:
            return function(**args)
        except Exception as error:
            raise self._user_error(key, f"{reference!r}", error) from error

    def _user_error(self, key: str, what: str, error: Exception) -> SpecError:
        frames = [f for f in extract_tb(error.__traceback__) if self._is_ours(f.filename)]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        return self.error(key, f"{what} raised {type(error).__name__}: {error}{where}")

    def _is_ours(self, filename: str) -> bool:
        return Path(filename).is_relative_to(self.path.parent) and filename != __file__

    def model(self, table: _Kind) -> Any:
        if ":" not in table.kind:
            from dtrain import models

            with self._built_in("model", table):
                return models.from_name(table.kind, **table.args)
        model = self.call("model.kind", table.kind, table.args)
        lacks = [m for m in ("init", "loss_and_grads", "predict") if not hasattr(model, m)]
        if lacks:
            raise self.error(
                "model.kind",
                f"{table.kind!r} returned a {type(model).__name__} without "
                f"{', '.join(lacks)}; expected a model with init, loss_and_grads and predict",
            )
        return model

    def optimizer(self, table: _Kind) -> Any:
        from dtrain import optim

        with self._built_in("train.optimizer", table):
            return optim.from_name(table.kind, **table.args)

    def partitioner(self, table: _Kind) -> Any:
        from dtrain.partition import Partitioner

        try:
            return Partitioner.from_dict({"kind": table.kind, **table.args})
        except SpecError as error:
            raise SpecError(f"{self.path}: train.{error}") from None

    def mode(self, train: _Train) -> Any:
        from dtrain import Async, Sync

        kind, key, other = (
            (Sync, "backups", "max_staleness")
            if train.mode == "sync"
            else (Async, "max_staleness", "backups")
        )
        if getattr(train, other) is not None:
            only = "async" if train.mode == "sync" else "sync"
            raise self.error(
                f"train.{other}",
                f"found it with mode {train.mode!r}, expected it with {only!r} alone",
            )
        value = getattr(train, key)
        return kind() if value is None else kind(**{key: value})

    def checkpoint(self, table: _Checkpoint) -> Any:
        from dtrain import Checkpoint

        place = table.dir if "://" in table.dir else str(self.resolve(table.dir))
        try:
            return Checkpoint(place, every=table.every, keep=table.keep)
        except SpecError as error:
            raise SpecError(f"{self.path}: {error}") from None

    def recovery(self, table: _Recovery) -> Any:
        from dtrain import Recovery

        try:
            return Recovery(**table.model_dump(exclude_unset=True))
        except SpecError as error:
            raise SpecError(f"{self.path}: {error}") from None

    @contextmanager
    def _built_in(self, key: str, table: _Kind) -> Iterator[None]:
        try:
            yield
        except (TypeError, ValueError) as error:  # SpecError is a ValueError
            about, _, text = str(error).partition(": ")
            if about == key.rpartition(".")[2]:
                raise self.error(f"{key}.kind", text) from error
            about = about.removeprefix(f"{table.kind}.")
            if re.split(r"[.[]", about)[0] in table.args:  # or a part of it: "lr.peak", "betas[0]"
                raise self.error(f"{key}.{about}", text) from error
            raise self.error(key, str(error)) from error

    # The data.

    def training_data(self, data: _Data) -> tuple[Any, ...]:
        """X and y, and weights if there are any."""
        if (data.path is None) == (data.factory is None):
            found = "neither" if data.path is None else "both"
            raise self.error("data", f"found {found}, expected either a path or a factory")
        if data.path is not None:
            if "args" in data.model_fields_set:
                raise self.error("data.args", "found with a path, expected only with a factory")
            return self._read("data.path", data.path, data)
        assert data.factory is not None
        for key in ("target", "features", "sample_weight"):
            if getattr(data, key) is not None:
                raise self.error(f"data.{key}", "found with a factory, expected only with a path")
        made = self.call("data.factory", data.factory, data.args)
        if not isinstance(made, tuple | list) or len(made) not in (2, 3):
            size = f" of {len(made)}" if isinstance(made, tuple | list) else ""
            raise self.error(
                "data.factory",
                f"{data.factory!r} returned a {type(made).__name__}{size}, expected (X, y), or "
                f"(X, y, w) with weights",
            )
        self._check_rows("data.factory", repr(data.factory), *made[:2])
        return tuple(made)

    def validation_data(self, data: _Data, X: Any) -> tuple[Any, ...]:
        assert isinstance(data.validation, str)
        arrays = self._read("data.validation", data.validation, data)
        shape, found = getattr(X, "shape", None), arrays[0].shape
        if shape is not None and found[1:] != shape[1:]:
            raise DataError(
                f"{self.path}: data.validation: the features in {self.resolve(data.validation)} "
                f"have the shape {found}, those to train on (from {data.path or data.factory}) "
                f"have {shape}: expected the same but for the rows"
            )
        return arrays

    def _read(self, key: str, text: str, data: _Data) -> tuple[Any, ...]:
        wanted = Wanted(data.features, data.target, data.sample_weight)
        try:
            arrays = read(text, self.path.parent, wanted)
        except Unreadable as problem:
            place = key if problem.key is None else f"data.{problem.key}"
            raise self.error(place, str(problem)) from problem
        except DataError as error:
            raise DataError(f"{self.path}: {key}: {error}") from error
        self._check_rows(key, str(self.resolve(text)), *arrays[:2])
        return arrays

    def _check_rows(self, key: str, origin: str, X: Any, y: Any) -> None:
        if is_frame(X) or is_series(y):
            return  # its rows may not be known
        shapes = [getattr(array, "shape", None) for array in (X, y)]
        if any(shape is None for shape in shapes):
            return  # not an array: the job itself will say what it takes
        rows = [shape[0] if shape else None for shape in shapes]
        unknown = any(row != row for row in rows)  # a Dask array's NaN
        if None in rows or (rows[0] != rows[1] and not unknown):
            raise DataError(
                f"{self.path}: {key}: from {origin} come X of the shape {shapes[0]} and y of "
                f"{shapes[1]}, expected as many rows in each"
            )


# --- The words of errors.


def _problems(error: ValidationError, document: Mapping[str, Any], path: Path) -> list[str]:
    """One line per key that is wrong."""
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        table: type[_Table] | None = _File
        found: Any = document
        keys: list[str] = []
        text = ""
        for part in item["loc"]:
            if table is None:
                break  # inside a value: pydantic's names for parts of a union, or indices
            name = str(part)
            keys.append(name)
            if isinstance(part, int):  # which of several tables
                found = found[part] if isinstance(found, list) else _NOTHING
                continue
            if name not in table.model_fields:
                known = list(table.model_fields)
                hint = did_you_mean(name, known)
                text = f"found an unknown key{hint}, expected one of {', '.join(known)}"
                break
            field = table.model_fields[name]
            found = found.get(name, _NOTHING) if isinstance(found, dict) else _NOTHING
            text = f"found {_show(found)}, expected {field.description}"
            table = next(
                (
                    t
                    for t in (field.annotation, *get_args(field.annotation))
                    if isinstance(t, type) and issubclass(t, _Table)
                ),
                None,
            )
        dotted = ".".join(keys)
        lines.setdefault(dotted, f"{path}: {dotted}: {text}")
    return list(lines.values())


_NOTHING = object()


def _show(value: Any) -> str:
    """A value as a TOML file has it, shortened."""
    if value is _NOTHING:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _located(error: SpecError | DataError, path: Path) -> SpecError | DataError:
    """A job's complaint about one of its fields, told of the file and the key behind the field."""
    field = re.match(r"(\w+)(?=: )", str(error))
    keys = {"validation_split": "data.validation", "validation_data": "data.validation"}
    keys.update({name: f"train.{name}" for name in _Train.model_fields})
    key = keys.get(field[1]) if field else None
    text = str(error) if key is None or field is None else key + str(error)[field.end() :]
    return type(error)(f"{path}: {text}")
