"""A chunk as a file: one rank's part of it, with everything that its bytes depend on in front.

    8 bytes    the format's name and version
    16 bytes   XXH3-128 of all that follows
    4 bytes    length of the label, little endian
    4,068      the label as JSON, zeros behind it
    payload    the chunk's `[layers, 2, tokens, kv_heads, head_dim]`, as it is in memory

A reader knows what it looks for (model, rank, owner, chunk, tokens) and takes nothing else: a file that is shorter or
longer, of another model, layout or user, or with one bit flipped is `Damaged`, and its chunk is missing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from connector.chunk import ChunkId

MAGIC = b"MSHARD\x00\x01"
HEADER_BYTES = 4096
CHECKSUM_BYTES = 16
_LABEL_AT = len(MAGIC) + CHECKSUM_BYTES + 4


class Damaged(Exception):
    """The file is not the chunk that was looked for, whole and unchanged."""


@dataclass(frozen=True, slots=True)
class Label:
    """Whose chunk this is a part of. `digest` stands for model, dtype, rotation and the layout over ranks."""

    digest: str
    rank: int
    owner: str
    id: ChunkId
    tokens: int


def header_of(label: Label, position: int, payload: memoryview) -> bytes:
    """The `HEADER_BYTES` in front of `payload`. Raises ValueError for a label that has no room in it."""
    text = json.dumps([label.digest, label.rank, label.owner, label.id, label.tokens, position]).encode()
    if len(text) > HEADER_BYTES - _LABEL_AT:
        raise ValueError("the owner's name is too long for a file")
    checked = len(text).to_bytes(4, "little") + text.ljust(HEADER_BYTES - _LABEL_AT, b"\0")
    return MAGIC + _checksum(checked, payload) + checked


def position_of(header: bytes | bytearray, payload: memoryview, label: Label) -> int:
    """The position that the payload was encoded at. Raises `Damaged`."""
    if len(header) != HEADER_BYTES or bytes(header[: len(MAGIC)]) != MAGIC:
        raise Damaged("not a chunk's file")
    checksum = bytes(header[len(MAGIC) : len(MAGIC) + CHECKSUM_BYTES])
    checked = bytes(header[len(MAGIC) + CHECKSUM_BYTES :])
    if _checksum(checked, payload) != checksum:
        raise Damaged("its checksum does not hold")
    *told, position = _read(header)
    if told != [label.digest, label.rank, label.owner, label.id, label.tokens] or not isinstance(position, int):
        raise Damaged("it is another chunk's")
    return position


def owner_of(header: bytes | bytearray) -> str:
    """Whose chunk a file says it holds; nothing is checked but the form. Raises `Damaged`."""
    if len(header) != HEADER_BYTES or bytes(header[: len(MAGIC)]) != MAGIC:
        raise Damaged("not a chunk's file")
    return str(_read(header)[2])


def _read(header: bytes | bytearray) -> Sequence[object]:
    length = int.from_bytes(header[_LABEL_AT - 4 : _LABEL_AT], "little")
    try:
        fields: list[object] = json.loads(bytes(header[_LABEL_AT : _LABEL_AT + length]))
        if len(fields) == 6:
            return fields
    except (ValueError, TypeError):
        pass
    raise Damaged("its label cannot be read")


def _checksum(checked: bytes, payload: memoryview) -> bytes:
    state = xxhash.xxh3_128(checked)
    state.update(payload)
    return bytes(state.digest())
