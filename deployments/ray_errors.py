"""Ray's errors, translated into our tree at this one place.

A shard's own `MemshardError` arrives wrapped in a `RayTaskError`; everything else says that a process, a node or
Serve itself failed. Whatever a shard raises outside our tree is a bug there: `EngineFailed`, with the original as
its cause for the log, never for the client.
"""

from __future__ import annotations

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
    RequestCancelledError,
)

from sharding.errors import Busy, EngineFailed, MemshardError, ShardGone, Unavailable
from sharding.ids import ShardId

_UNREACHABLE = (
    ActorUnavailableError,
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    ObjectLostError,
    TaskCancelledError,
    RequestCancelledError,
    ReplicaUnavailableError,
)


def as_memshard_error(error: BaseException, shard: ShardId) -> MemshardError:
    """What a failed call to `shard` means. The caller raises it `from error`."""
    if isinstance(error, RayTaskError):
        # Ray raises a class derived from both RayTaskError and the cause's class, without the cause's attributes.
        return _from_task_error(error, shard)
    if isinstance(error, MemshardError):  # raised by our router, in this process
        return error
    if isinstance(error, ActorDiedError):  # final: Serve never restarts a replica under the same id
        return ShardGone(f"Shard {shard} died.", shard=shard, certain=True)
    if isinstance(error, _UNREACHABLE):
        return ShardGone(f"Shard {shard} cannot be reached.", shard=shard, certain=False)
    if isinstance(error, BackPressureError):
        return Busy("Too many requests are waiting.", shard=shard)
    if isinstance(error, DeploymentUnavailableError):
        return Unavailable("The shards are not running.", shard=shard)
    if isinstance(error, RayError | RayServeException):
        return Unavailable("The call to the shard failed.", shard=shard)
    return EngineFailed("The shard failed to answer this request.", shard=shard)


def _from_task_error(error: RayTaskError, shard: ShardId) -> MemshardError:
    cause = error.cause
    if isinstance(cause, MemshardError):
        return cause
    if isinstance(cause, RayError | RayServeException) and not isinstance(cause, RayTaskError):
        return as_memshard_error(cause, shard)
    return EngineFailed("The shard failed to answer this request.", shard=shard)
