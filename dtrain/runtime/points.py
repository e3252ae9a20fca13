"""Named points of a step, for tests that want to die or to stop right there.

``computing writing waiting applying flipping``, and ``saving`` in a checkpoint.  Nothing happens
at them unless a test puts a function here, in the process that it is about.
"""

from __future__ import annotations

from collections.abc import Callable

hook: Callable[[str], None] | None = None


def at_point(name: str) -> None:
    if hook is not None:
        hook(name)
