"""A chunk as a file: one rank's part of it, with everything that its bytes depend on in front.

    in the clear                                              sealed
    8 bytes    the format's name and version                  8 bytes    likewise
    16 bytes   XXH3-128 of all that follows                   16 bytes   AES-256-GCM's tag of the payload
    4 bytes    length of the label, little endian             16 bytes   the file's own salt
    4,068      the label as JSON, zeros behind it             4,056      the label, its length and zeros, sealed
    payload    the chunk's `[layers, 2, tokens, kv_heads, head_dim]`, as it is in memory, or encrypted

A reader knows what it looks for (model, rank, owner, chunk, tokens) and takes nothing else: a file that is shorter or
longer, of another model, layout or user, or with one bit flipped is `Damaged`, and its chunk is missing. So is one that
was sealed with another key, one that is sealed where there is no key, and one in the clear where there is one.

Each sealed file has a key of its own, HMAC-SHA256 of its salt under the shard's: the two nonces never meet twice under
one key, however many files there are. The payload is bound to the label, which tells nobody whose it is.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from connector.chunk import ChunkId

CLEAR = b"MSHARD\x00\x01"
SEALED = b"MSHARD\x01\x01"
HEADER_BYTES = 4096
CHECKSUM_BYTES = 16
SALT_BYTES = 16
PIECE_BYTES = 256 << 10
"""What is encrypted at a time: so much of a chunk is copied, never all of it."""

_FIRST = len(CLEAR) + CHECKSUM_BYTES  # what the checksum is of
_BOX_BYTES = HEADER_BYTES - _FIRST - SALT_BYTES
_NONCES = (bytes(12), bytes(11) + b"\x01")  # of the label and of the payload, under a key that no other file has


class Damaged(Exception):
    """The file is not the chunk that was looked for, whole and unchanged, or is not to be read with this key."""


@dataclass(frozen=True, slots=True)
class Label:
    """Whose chunk this is a part of. `digest` stands for model, dtype, rotation and the layout over ranks."""

    digest: str
    rank: int
    owner: str
    id: ChunkId
    tokens: int

    def told(self) -> list[object]:
        """As it stands in the file."""
        return [self.digest, self.rank, self.owner, self.id, self.tokens]


Pieces = Iterable[bytes | memoryview]


class ChunkFormat:
    """Writes and reads files with one key of 32 bytes, or without one. Whoever has another takes none of them."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key

    def writing(self, label: Label, position: int, payload: memoryview) -> tuple[Pieces, Callable[[], bytes]]:
        """The payload as it stands in the file, in pieces; and what gives the `HEADER_BYTES` in front of it once all
        pieces were taken. Raises ValueError for a label that has no room there."""
        if self._key is None:
            checked = _packed(label, position, HEADER_BYTES - _FIRST)
            return [payload], lambda: CLEAR + _checksum(checked, payload) + checked
        salt = secrets.token_bytes(SALT_BYTES)
        key = self._of(salt)
        box = AESGCM(key).encrypt(_NONCES[0], _packed(label, position, _BOX_BYTES - CHECKSUM_BYTES), SEALED)
        encryptor = Cipher(AES(key), GCM(_NONCES[1])).encryptor()
        encryptor.authenticate_additional_data(box)

        def pieces() -> Iterator[bytes]:
            for at in range(0, len(payload), PIECE_BYTES):
                yield encryptor.update(payload[at : at + PIECE_BYTES])
            encryptor.finalize()

        return pieces(), lambda: SEALED + encryptor.tag + salt + box

    def position_of(self, header: bytes | bytearray, payload: memoryview, label: Label) -> int:
        """The position that the payload was encoded at; a sealed payload is opened where it stands. Raises `Damaged`:
        then `payload` holds nothing of use."""
        fields = self._fields(header)
        checksum = bytes(header[len(CLEAR) : _FIRST])
        if self._key is None:
            if _checksum(bytes(header[_FIRST:]), payload) != checksum:
                raise Damaged("its checksum does not hold")
        else:
            key, box = self._sealed(header)
            decryptor = Cipher(AES(key), GCM(_NONCES[1], checksum)).decryptor()
            decryptor.authenticate_additional_data(box)
            for at in range(0, len(payload), PIECE_BYTES):
                piece = payload[at : at + PIECE_BYTES]
                decryptor.update_into(bytes(piece), piece)
            try:
                decryptor.finalize()
            except InvalidTag as error:
                raise Damaged("it is not what was sealed") from error
        *told, position = fields
        if told != label.told() or not isinstance(position, int):
            raise Damaged("it is another chunk's")
        return position

    def owner_of(self, header: bytes | bytearray) -> str:
        """Whose chunk a file says it holds; of one in the clear, nothing is checked but the form. Raises `Damaged`."""
        return str(self._fields(header)[2])

    def _fields(self, header: bytes | bytearray) -> Sequence[object]:
        """The label's fields and the position, of a file in this format."""
        magic = bytes(header[: len(CLEAR)])
        if len(header) != HEADER_BYTES or magic not in (CLEAR, SEALED):
            raise Damaged("not a chunk's file")
        if self._key is None:
            if magic == SEALED:
                raise Damaged("it is encrypted, and there is no key")
            return _unpacked(bytes(header[_FIRST:]))
        if magic == CLEAR:
            raise Damaged("it is not encrypted")
        key, box = self._sealed(header)
        try:
            return _unpacked(AESGCM(key).decrypt(_NONCES[0], box, SEALED))
        except InvalidTag as error:
            raise Damaged("it was encrypted with another key, or changed") from error

    def _sealed(self, header: bytes | bytearray) -> tuple[bytes, bytes]:
        """The key of a sealed file, and its sealed label."""
        return self._of(bytes(header[_FIRST : _FIRST + SALT_BYTES])), bytes(header[_FIRST + SALT_BYTES :])

    def _of(self, salt: bytes) -> bytes:
        """The key of the file with this salt."""
        assert self._key is not None
        return hmac.digest(self._key, salt, "sha256")


def _packed(label: Label, position: int, size: int) -> bytes:
    text = json.dumps([*label.told(), position]).encode()
    if len(text) > size - 4:
        raise ValueError("the owner's name is too long for a file")
    return len(text).to_bytes(4, "little") + text.ljust(size - 4, b"\0")


def _unpacked(packed: bytes) -> Sequence[object]:
    length = int.from_bytes(packed[:4], "little")
    try:
        fields: list[object] = json.loads(packed[4 : 4 + length])
        if len(fields) == 6:
            return fields
    except (ValueError, TypeError):
        pass
    raise Damaged("its label cannot be read")


def _checksum(checked: bytes, payload: memoryview) -> bytes:
    state = xxhash.xxh3_128(checked)
    state.update(payload)
    return bytes(state.digest())
