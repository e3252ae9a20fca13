"""Questions and answers over Dask's RPC, with deadlines and typed errors.

Dask's own calls have no timeout, log the errors of handlers on both sides, and answer None when
there is no such handler.  Here every call has a deadline, and an error of dtrain arrives as
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from dtrain import errors
from dtrain.errors import DeadlineError, DTrainError, ProtocolError


def answering(handler: Callable[..., Any]) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Wrap a handler (sync or async): its value or its error of dtrain travels in an envelope."""

    @wraps(handler)
    async def answer(**message: Any) -> dict[str, Any]:
        try:
            value = handler(**message)
            if asyncio.iscoroutine(value):
                value = await value
        except DTrainError as error:
            return {"error": type(error).__name__, "message": str(error)}
        return {"value": value}

    return answer


def opened(answer: Any, what: str) -> Any:
    """The value in an envelope, or its error raised."""
    if not isinstance(answer, dict) or not ("value" in answer or "error" in answer):
        raise ProtocolError(f"{what}: found {answer!r:.100}, expected an answer of dtrain")
    if "error" in answer:
        kind = getattr(errors, answer["error"], DTrainError)
        raise kind(answer["message"])
    return answer["value"]


async def ask(peer: Any, op: str, deadline: float, **message: Any) -> Any:
    """Call ``op`` of a peer: ``worker.rpc(address)``, ``worker.scheduler`` and the like."""
    address = getattr(peer, "address", getattr(peer, "addr", peer))
    try:
        # `asyncio.wait_for` makes one task more for each call.
        async with asyncio.timeout(deadline):
            answer = await getattr(peer, op)(**message)
    except TimeoutError:
        raise DeadlineError(f"{op}: {address} has not answered in {deadline:.0f} s") from None
    return opened(answer, f"{op} at {address}")
