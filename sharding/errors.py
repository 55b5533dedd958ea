"""The one error tree of Memshard.

Every error that a user or an operator can meet is one of these; its message is a sentence that says what to
do. Whether a retry can help is the class, never a flag. HTTP statuses are assigned in one place,
`deployments/http_errors.py`.

    MemshardError
    ├── RequestError            the caller must change the request: retrying it as it is cannot help
    │   ├── InvalidRequest      400   a field is missing, malformed or out of range (`field` names it)
    │   ├── ContextTooLong      400   prompt + max_tokens do not fit the model
    │   ├── Unauthorized        401   no key, or one that is not known
    │   ├── Forbidden           403   the key may not do this
    │   ├── NotFound            404   no such fact, user or model
    │   ├── Conflict            409   it would contradict what is stored
    │   ├── NotOffered          501   a part of another API that this server does not have
    │   └── TooLarge            413   a fact or a body over its limit
    ├── RetryableError          the same request may succeed later (`retry_after_s`)
    │   ├── Busy                429   this shard's queue is full
    │   ├── RateLimited         429   a minute's requests or tokens are used up
    │   ├── Unavailable         503   Redis, or every shard, is away
    │   ├── DeadlineExceeded    504   a bounded wait ran out
    │   ├── WrongShard          internal: the shard does not own this user (any more); ask the directory again
    │   └── ShardGone           internal: the shard's replica no longer exists; claim the user elsewhere
    ├── EngineFailed            500   the engine ended a request with an error
    └── StartupError            the process must not start: port in use, too little memory, model unservable

Errors cross process borders by pickle, so every detail travels in `details`.
"""

from __future__ import annotations

from typing import Any


class MemshardError(Exception):
    """Base of the tree. `details` are plain values (str, int, float) and survive pickling."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.details)


def _rebuild(cls: type[MemshardError], message: str, details: dict[str, Any]) -> MemshardError:
    return cls(message, **details)


class RequestError(MemshardError):
    """The caller must change the request."""


class InvalidRequest(RequestError):
    """A field is missing, malformed or out of range; `details["field"]` names it."""


class ContextTooLong(RequestError):
    """Prompt and requested output together exceed the model's context."""


class NotFound(RequestError):
    """No such fact, user or model."""


class Unauthorized(RequestError):
    """No key came with the request, or one that is not known."""


class Forbidden(RequestError):
    """The key may not do this."""


class Conflict(RequestError):
    """The change would contradict what is stored."""


class NotOffered(RequestError):
    """A part of another server's API that this one does not have."""


class TooLarge(RequestError):
    """A fact or a body is over its stated limit."""


class RetryableError(MemshardError):
    """The same request may succeed later."""

    @property
    def retry_after_s(self) -> float:
        """Seconds after which a retry makes sense."""
        return float(self.details.get("retry_after_s", 1.0))


class Busy(RetryableError):
    """This shard's queue is full."""


class RateLimited(RetryableError):
    """What a minute has room for is used up (`limit`, `remaining`)."""


class Unavailable(RetryableError):
    """Redis, or every shard, is away."""


class DeadlineExceeded(RetryableError):
    """A bounded wait ran out."""


class WrongShard(RetryableError):
    """The shard does not own the user under the epoch that the caller believes in."""


class ShardGone(RetryableError):
    """The replica that owned the user no longer exists."""


class EngineFailed(MemshardError):
    """The engine ended a request with an error, or died."""


class StartupError(MemshardError):
    """The process must not start, and the message says why in one line."""
