"""Bytes handed from one process to another of the same machine, without a socket or a name.

The lender writes them to memory that only a descriptor stands for (``memfd_create(2)``); the
borrower opens it through ``/proc/PID/fd/N`` and has a descriptor of its own.  The memory is freed
when the last of them is closed, also by a death, so that nothing can be left behind.  A token in
front of the bytes tells whether it is the very memory that was meant: the process may be on
another machine, or in another namespace, and there may be one of that number here, too.

To get memory costs as much as to fill it several times.  So a :class:`Lender` lends again what it
has lent before, once it is told that nobody wants it any more; the bytes then have another token.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

#: Bytes of the token.
_TOKEN = 16

#: Bytes from which lending costs less than sending.
WORTH = 1 << 15

#: So many parts are written at once; Linux takes 1024.
_PARTS = 500

#: What a lender keeps at most, lent or free: pieces of memory, and their bytes.
_KEPT, _KEPT_BYTES = 16, 1 << 25

#: Memory that is more times larger than what is to be lent is left for something larger.
_TOO_LARGE = 4


class Lent:
    """Bytes in memory that other processes may open.

    Attributes
    ----------
    nbytes : int
    """

    def __init__(self, fd: int, nbytes: int, token: bytes) -> None:
        self._fd = fd
        self._token = token
        self.nbytes = nbytes
        #: bytes that there is memory for
        self.capacity = nbytes

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> Lent | None:
        """A copy of uint8 bytes; None where there is no such memory, or not enough."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            fd = os.memfd_create("dtrain", os.MFD_CLOEXEC)
        except OSError:
            return None
        made = cls(fd, sum(part.nbytes for part in parts), b"")
        try:
            made.write(parts)
        except OSError:
            made.close()
            return None
        return made

    def write(self, parts: Sequence[np.ndarray]) -> None:
        """Lend other bytes, no more than there is memory for; nobody may be reading."""
        self._token, self.nbytes = secrets.token_bytes(_TOKEN), sum(part.nbytes for part in parts)
        if len(parts) > _PARTS:
            parts = [np.concatenate(parts)]
        # The token first: who reads without leave finds out by it.
        done = os.pwritev(self._fd, [self._token, *(part.data for part in parts)], 0)
        if done < _TOKEN + self.nbytes:
            # Linux writes 2 GiB at once, and less if it is interrupted.
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
            while done < _TOKEN + self.nbytes:
                done += os.pwrite(self._fd, whole[done - _TOKEN :].data, done)

    @classmethod
    def borrowed(cls, told: dict[str, Any]) -> Lent | None:
        """What another process has told of; None if it cannot be opened from here."""
        try:
            fd = os.open(f"/proc/{int(told['pid'])}/fd/{int(told['fd'])}", os.O_RDONLY)
        except OSError:
            return None
        found = cls(fd, told["nbytes"], told["token"])
        try:
            if os.pread(fd, _TOKEN, 0) == told["token"]:
                return found
        except OSError:
            # A socket or a pipe of that number.
            pass
        found.close()
        return None

    def told(self) -> dict[str, Any]:
        """What a borrower has to know; it opens it while this is not closed."""
        return {"pid": os.getpid(), "fd": self._fd, "nbytes": self.nbytes, "token": self._token}

    def read(self, out: np.ndarray | None = None) -> np.ndarray:
        """A copy of the bytes: uint8, shape (nbytes,).

        Raises OSError if they are lent for something else by now.
        """
        if out is None:
            out = np.empty(self.nbytes, np.uint8)
        self.fill([(0, out[: self.nbytes])])
        return out

    def fill(self, outs: Iterable[tuple[int, np.ndarray]]) -> None:
        """Copy to each uint8 array the bytes from its start on; raises OSError as :meth:`read`."""
        for start, out in outs:
            done = 0
            while done < out.nbytes:
                step = os.preadv(self._fd, [out[done:].data], _TOKEN + start + done)
                if not step:
                    raise OSError(
                        f"found {start + done} bytes of lent memory, expected {start + out.nbytes}"
                    )
                done += step
        if os.pread(self._fd, _TOKEN, 0) != self._token:
            raise OSError("found other bytes in lent memory than it was lent for")

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def lent_again(memory: Lent | None, parts: Sequence[np.ndarray]) -> Lent | None:
    """A copy of the bytes, in ``memory`` if they fit in, else in new one, and that is closed.

    None where there is no such memory.  Who still reads what was there before is told.
    """
    nbytes = sum(part.nbytes for part in parts)
    if memory is not None and nbytes <= memory.capacity <= nbytes * _TOO_LARGE:
        try:
            memory.write(parts)
        except OSError:
            memory.close()
            return None
        return memory
    if memory is not None:
        memory.close()
    return Lent.of(parts)


class Lender:
    """Lends again what comes back; for one thread."""

    def __init__(self) -> None:
        #: number -> memory that is lent under it
        self._out: dict[int, Lent] = {}
        self._free: list[Lent] = []

    def lend(self, parts: Sequence[np.ndarray]) -> Lent | None:
        """A copy of the bytes, to be kept or closed; None where there is no such memory."""
        nbytes = sum(part.nbytes for part in parts)
        fits = [m for m in self._free if nbytes <= m.capacity <= nbytes * _TOO_LARGE]
        if not fits:
            return Lent.of(parts)
        found = min(fits, key=lambda memory: memory.capacity)
        self._free.remove(found)
        found.write(parts)
        return found

    def keep(self, number: int, lent: Lent) -> None:
        """It is lent under that number; what is too much is let go of, the oldest first."""
        self._out[number] = lent
        while self._too_much():
            if self._free:
                self._free.pop(0).close()
            else:
                # Its borrower has it still; it is only not lent again.
                self._out.pop(next(iter(self._out))).close()

    def back(self, numbers: Iterable[int]) -> None:
        """Nobody wants what was lent under these numbers any more."""
        for number in numbers:
            lent = self._out.pop(number, None)
            if lent is not None:
                self._free.append(lent)

    def _too_much(self) -> bool:
        every = [*self._out.values(), *self._free]
        return len(every) > _KEPT or sum(m.capacity for m in every) > _KEPT_BYTES
