"""Sends values between the process of a program and the process of its tests: tagged JSON in framed messages.

The receiver builds values of exact built-in types, so that no class of the program (with its own __eq__, for example)
takes part in a comparison. Objects of other types stay in their process; the other side gets an index for them.
"""

import builtins
import json
import socket
import struct
from collections import deque
from collections.abc import Callable, ItemsView, KeysView, ValuesView
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

LIMIT = 16 << 20  # bytes of a message
BATCH = 256  # values of an iterator in one message
HASHED = 20_000  # most integers beyond EXACT, and other numbers with forgeable hash collisions, in a message
EXACT = 1 << 53
COLLECTIONS = {kind.__name__: kind for kind in (dict, tuple, set, frozenset, deque)}
WRITTEN = {  # how values of a type are written and read; a type stands before its bases
    bytes: (lambda value: bytes(value).decode("latin1"), lambda text: text.encode("latin1")),
    bytearray: (lambda value: bytes(value).decode("latin1"), lambda text: bytearray(text.encode("latin1"))),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    Decimal: (str, Decimal),
    Fraction: (str, Fraction),
    datetime: (datetime.isoformat, datetime.fromisoformat),
    date: (date.isoformat, date.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    timedelta: (timedelta.total_seconds, lambda seconds: timedelta(seconds=seconds)),
}
READ = {kind.__name__: read for kind, (_, read) in WRITTEN.items()}
READ |= {"int": lambda text: int(text, 16), "type": lambda name: getattr(builtins, name)}


class Closed(Exception):
    """The other side is gone."""


class Unsendable(TypeError):
    """The value is not plain data."""


class TooLarge(Unsendable):
    """The value does not fit into a message."""


def encode(value: Any, reference: Callable[[Any], Any]) -> Any:
    """Encode a value as JSON. `reference(object)` returns JSON that refers to an object that is not plain data."""

    def each(values) -> list:
        return [encode(item, reference) for item in values]

    match value:
        case None | bool():
            return value
        case int():
            return int(value) if -EXACT < value < EXACT else {"int": hex(value)}
        case float():
            return float(value)
        case str():
            return str(value)
        case list() | range() | KeysView() | ValuesView() | ItemsView():
            return each(value)
        case dict():
            return {"dict": [each(pair) for pair in value.items()]}
        case type() if getattr(builtins, value.__name__, None) is value:
            return {"type": value.__name__}
    for kind in COLLECTIONS.values():
        if isinstance(value, kind):
            return {kind.__name__: each(value)}
    for kind, (write, _) in WRITTEN.items():
        if isinstance(value, kind):
            return {kind.__name__: write(value)}
    return {"reference": reference(value)}


def decode(value: Any, dereference: Callable[[Any], Any]) -> Any:
    """Decode a value: the inverse of `encode`. `dereference` is the inverse of `reference`."""
    if isinstance(value, list):
        return [decode(item, dereference) for item in value]
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind in COLLECTIONS:
        return COLLECTIONS[kind](decode(item, dereference) for item in content)
    return dereference(content) if kind == "reference" else READ[kind](content)


def too_slow(value: Any) -> bool:
    """Return whether a message has so many large numbers that building a set of them could take minutes."""
    count, left = 0, [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            count += bool(each.keys() & {"int", "Decimal", "Fraction", "timedelta"})
            left += each.values()
        elif isinstance(each, list):
            left += each
    return count > HASHED


def update(old: Any, new: Any) -> Any:
    """Return `old` with the content of `new`, changed in place if its type allows that."""
    if type(old) is not type(new):
        return new
    if isinstance(old, tuple):
        return old if old == new else tuple(update(*pair) for pair in zip(old, new, strict=False)) + new[len(old) :]
    if isinstance(old, list):
        content = [update(*pair) for pair in zip(old, new, strict=False)] + new[len(old) :]
    elif isinstance(old, dict):
        content = {key: update(old[key], value) if key in old else value for key, value in new.items()}
    elif isinstance(old, set | deque | bytearray):
        content = new
    else:
        return new
    old.clear()
    (old.update if isinstance(old, dict | set) else old.extend)(content)
    return old


def send(channel: socket.socket, message: Any) -> None:
    body = json.dumps(message).encode()
    if len(body) > LIMIT:
        raise TooLarge(f"a value of {len(body)} bytes")
    try:
        channel.sendall(struct.pack("!I", len(body)) + body)
    except OSError:
        raise Closed from None


def receive(channel: socket.socket, limit: int = LIMIT) -> Any:
    (size,) = struct.unpack("!I", _read(channel, 4))
    if size > limit:
        raise Closed
    return json.loads(_read(channel, size))


def _read(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        try:
            part = channel.recv(min(size, 1 << 20))
        except OSError:
            part = b""
        if not part:
            raise Closed
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
