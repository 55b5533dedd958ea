"""Encryption of what people said, where it leaves the process: AES-256-GCM. Into Redis, with a random nonce:

    sealed = version (1 byte) | nonce (12) | ciphertext and tag        bound to what it belongs to (`about`)

Text, role, scopes, metadata and dates of a fact are sealed together; embeddings, turns and feedback each on their own.
What Lua has to read stays open: ids, versions, times, and the hash by which a user's facts are told apart, which is
keyed with the same secret, so that nobody can guess texts from it. Who has how many facts, since when, is not hidden.

Chunks' files are sealed with a key that follows from the same secret (`connector/chunk_file.py`).

Without a secret everything is kept as it is. A store that was written with another secret, or with none, is refused
where it is read, with a sentence that says so.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sharding.errors import MemshardError, StartupError

VERSION = b"\x01"
NONCE_BYTES = 12
SECRET_BYTES = 32


class HeldSecret(str):
    """A secret as text that stays in this process: pickled, it is the place where it was found and its digest, and who
    unpickles it looks there, too. So it is in nothing that is kept of a deployment, nor in a message.

    The place is a file's path, or the name of a variable of the environment.
    """

    __slots__ = ("file", "variable")
    variable: str | None
    file: str | None

    @classmethod
    def found(cls, *, variable: str | None = None, file: str | None = None) -> HeldSecret:
        """The secret that is there. Raises `StartupError`."""
        try:
            text = os.environ[variable] if variable is not None else Path(file or "").read_text()
        except (KeyError, OSError, UnicodeDecodeError) as failure:
            raise StartupError(f"The encryption key is not to be read from {variable or file} here") from failure
        secret = cls(text.strip())
        secret.variable, secret.file = variable, file
        return secret

    @classmethod
    def _found_again(cls, variable: str | None, file: str | None, digest: bytes) -> HeldSecret:
        secret = cls.found(variable=variable, file=file)
        if not hmac.compare_digest(_digest(secret), digest):
            raise StartupError(f"The encryption key in {variable or file} is not the same for all processes")
        return secret

    def __reduce__(self) -> tuple[object, ...]:
        return HeldSecret._found_again, (self.variable, self.file, _digest(self))

    def __repr__(self) -> str:
        return "HeldSecret(…)"


class Unreadable(MemshardError):
    """What Redis keeps was sealed with another secret, or with none, or was damaged."""


class Seal:
    """Seals and opens with one secret; without one (`Seal(None)`) it passes everything through."""

    def __init__(self, secret: str | None) -> None:
        """`secret`: 32 bytes in base64. Raises `StartupError`."""
        self._cipher: AESGCM | None = None
        self._hash_key = b""
        self.file_key: bytes | None = None  # for chunks' files
        if secret is None:
            return
        try:
            key = base64.b64decode(secret.strip(), validate=True)
        except (binascii.Error, ValueError) as error:
            raise StartupError("The encryption key is not base64; `memshard keys secret` makes one") from error
        if len(key) != SECRET_BYTES:
            raise StartupError(f"The encryption key has {len(key)} bytes and needs {SECRET_BYTES}")
        self._cipher = AESGCM(hmac.digest(key, b"memshard: seal", "sha256"))
        self._hash_key = hmac.digest(key, b"memshard: text hash", "sha256")
        self.file_key = hmac.digest(key, b"memshard: chunk files", "sha256")

    @property
    def on(self) -> bool:
        """Whether anything is sealed."""
        return self._cipher is not None

    def seal(self, plain: bytes, about: str) -> bytes:
        """`plain`, readable only by `open` with the same secret and the same `about`."""
        if self._cipher is None:
            return plain
        nonce = secrets.token_bytes(NONCE_BYTES)
        return VERSION + nonce + self._cipher.encrypt(nonce, plain, about.encode(errors="surrogatepass"))

    def open(self, sealed: bytes, about: str) -> bytes:
        """What was sealed. Raises `Unreadable`."""
        if self._cipher is None:
            return sealed
        try:
            if sealed[:1] != VERSION:
                raise InvalidTag
            nonce, rest = sealed[1 : 1 + NONCE_BYTES], sealed[1 + NONCE_BYTES :]
            return self._cipher.decrypt(nonce, rest, about.encode(errors="surrogatepass"))
        except (InvalidTag, ValueError) as error:
            raise unreadable() from error

    def seal_text(self, plain: str, about: str) -> str:
        """As `seal`, text to text."""
        if self._cipher is None:
            return plain
        return base64.b64encode(self.seal(plain.encode(), about)).decode()

    def open_text(self, sealed: str, about: str) -> str:
        """As `open`, text to text."""
        if self._cipher is None:
            return sealed
        try:
            return self.open(base64.b64decode(sealed, validate=True), about).decode()
        except (binascii.Error, ValueError) as error:
            raise unreadable() from error

    def hash(self, digest: str) -> str:
        """A text's hash as Redis may see it."""
        if self._cipher is None:
            return digest
        return hmac.new(self._hash_key, digest.encode(), hashlib.sha256).hexdigest()


def _digest(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode(), digest_size=16, person=b"memshard-secret").digest()


def new_secret() -> str:
    """A secret that nobody has used."""
    return base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def unreadable() -> Unreadable:
    """The error for what this process cannot read."""
    return Unreadable(
        "What Redis keeps was not written with this encryption key; set the one that it was written with."
    )
