"""What optimizers and transforms have in common: a kind and its arguments, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dtrain.schedules import Schedule


@dataclass(frozen=True, repr=False)
class Described:
    """A value that its ``kind`` and its plain ``args`` describe, in a job's TOML file too."""

    kind: str
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", MappingProxyType(self._checked()))

    def _checked(self) -> dict[str, Any]:
        """The arguments in their plain form, with defaults."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """``{"kind": ..., **args}`` of plain values, as written in a job's TOML file."""
        return {"kind": self.kind, **{k: _plain(v) for k, v in self.args.items()}}

    def __hash__(self) -> int:
        return hash((self.kind, tuple(self.args.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, dict(self.args))

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{k}={v!r}' for k, v in self.args.items())})"


def _plain(value: Any) -> Any:
    if isinstance(value, Described | Schedule):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
