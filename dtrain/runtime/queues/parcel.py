"""An item of a queue as one run of bytes.

One array goes over the network several times faster than many; and whoever stores or passes on
an item need not know what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
from distributed.protocol import deserialize, serialize, to_serialize
from distributed.protocol.serialize import msgpack_decode_default, msgpack_encode_default
from distributed.protocol.utils import msgpack_opts
from distributed.utils import ensure_memoryview

from dtrain.errors import DataError
from dtrain.runtime.buffers import Buffers, room

#: Every frame begins on such a boundary, so that arrays are aligned as NumPy wants them.
_ALIGN = 64

_WORD = np.dtype("<u8")

#: Bytes from which it costs less to send them beside a message than in it.
_FEW = 1 << 14

_PADDING = np.zeros(_ALIGN, np.uint8)

_CONTAINERS = (dict, tuple, list)


def pack(item: Any) -> np.ndarray:
    """A copy of an item as bytes: uint8, shape (n,); see :func:`pieces`."""
    return joined(pieces(item))


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """A copy of bytes that lie in several places."""
    return np.concatenate(parts)


def pieces(item: Any) -> list[np.ndarray]:
    """An item as bytes that lie in several places, its arrays where they are: uint8, shape (n,).

    Arrays, and dicts, tuples and lists of arrays, are written as Dask writes them, without
    pickle; what else there is in them, or instead, is pickled.  First come the lengths: of the
    header, the number of frames, and theirs; then the header, then the frames.

    Raises
    ------
    DataError
        Something in the item cannot be pickled.
    """
    apart = type(item) in _CONTAINERS and any(type(v) is np.ndarray for v in _values(item))
    try:
        header, frames = serialize(
            item, on_error="raise", iterate_collection=apart and _named_by_words(item)
        )
    except TypeError as error:
        cause = error.__cause__ or error
        raise DataError(
            f"item: found {type(item).__name__}, expected what can be pickled ({cause})"
        ) from error
    packed = msgpack.packb(header, default=msgpack_encode_default, use_bin_type=True)
    views = [ensure_memoryview(frame) for frame in frames]
    words = np.array([len(packed), len(views), *(v.nbytes for v in views)], _WORD)
    starts = _starts(words)
    found = [words.view(np.uint8), np.frombuffer(packed, np.uint8)]
    at = words.nbytes + len(packed)
    for start, view in zip(starts, views, strict=True):
        if start > at:
            found.append(_PADDING[: start - at])
        if view.nbytes:
            found.append(np.frombuffer(view, np.uint8))
        at = start + view.nbytes
    return found


def enveloped(parcel: np.ndarray) -> Any:
    """The bytes as they go into a message: few as part of it, many beside it, without a copy."""
    return parcel.tobytes() if parcel.nbytes < _FEW else to_serialize(parcel)


def opened(found: bytes | np.ndarray) -> np.ndarray:
    """What has come in a message."""
    return np.frombuffer(found, np.uint8) if isinstance(found, bytes) else found


def unpack(flat: np.ndarray, *, own: bool = False, buffers: Buffers | None = None) -> Any:
    """The item.

    Its arrays are aligned and the caller's own: copies, in memory of ``buffers`` if there are
    any, or ``own``: views of ``flat``, which is :func:`~dtrain.runtime.buffers.room` that nobody
    else has.
    """
    n = int(flat[_WORD.itemsize : 2 * _WORD.itemsize].view(_WORD)[0])
    words = flat[: (2 + n) * _WORD.itemsize].view(_WORD)
    starts = _starts(words)
    first = words.nbytes
    header = msgpack.unpackb(
        flat[first : first + int(words[0])].tobytes(),
        object_hook=msgpack_decode_default,
        **msgpack_opts,
    )
    if not own:
        copy = (buffers.room if buffers else room)(flat.nbytes)
        copy[:] = flat
        flat = copy
    frames = [flat[s : s + int(k)].data for s, k in zip(starts, words[2:], strict=True)]
    return deserialize(header, frames)


def _values(item: Any) -> Any:
    return item.values() if type(item) is dict else item


def _named_by_words(item: Any) -> bool:
    """Whether all keys of nested dicts are strings or integers: Dask's header keeps no others."""
    if type(item) not in _CONTAINERS:
        return True
    if type(item) is dict and not all(type(key) in (str, int) for key in item):
        return False
    return all(_named_by_words(value) for value in _values(item))


def _starts(words: np.ndarray) -> list[int]:
    """Where the frames begin."""
    starts, end = [], words.nbytes + int(words[0])
    for length in words[2:].tolist():
        start = -(-end // _ALIGN) * _ALIGN
        starts.append(start)
        end = start + length
    return starts
