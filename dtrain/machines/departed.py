"""Who has died or left, so that what they have sent before is refused when it comes after all."""

from __future__ import annotations

from dataclasses import dataclass, field

#: So many are remembered, the latest.
MOST = 10_000


@dataclass
class Departed:
    """The latest names that were added; a name stands for one life, and never comes again."""

    _names: dict[str, None] = field(default_factory=dict)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def add(self, name: str) -> bool:
        """Whether it is new."""
        if name in self._names:
            return False
        self._names[name] = None
        if len(self._names) > MOST:
            del self._names[next(iter(self._names))]
        return True
