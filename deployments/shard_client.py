"""One hop from the gateway to one shard: pinned, with a deadline, cancelled when the caller goes away.

`Shards` is what the gateway needs; `ShardClient` is it over a Serve handle (tests have one in their own process).
Nothing is retried here, that needs the directory: see `owner_calls.py`. Errors leave as members of our tree.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.messages import (
    AddCall,
    AddedFact,
    ChatCall,
    ChatEvent,
    FactCall,
    FactPage,
    FactView,
    ForgetCall,
    ListCall,
    ShardStatus,
)
from deployments.ray_errors import as_memshard_error
from sharding.errors import DeadlineExceeded, MemshardError, ShardGone
from sharding.ids import ShardId


class Shards(Protocol):
    """The methods of a shard replica, each called on the shard that is named.

    All raise members of the error tree only; ShardGone, Busy and DeadlineExceeded come from the way there.
    """

    def chat(self, shard: ShardId, call: ChatCall) -> AsyncGenerator[ChatEvent, None]: ...

    async def add(self, shard: ShardId, call: AddCall) -> tuple[AddedFact, ...]: ...

    async def list_facts(self, shard: ShardId, call: ListCall) -> FactPage: ...

    async def get_fact(self, shard: ShardId, call: FactCall) -> FactView: ...

    async def delete_fact(self, shard: ShardId, call: FactCall) -> None: ...

    async def forget(self, shard: ShardId, call: ForgetCall) -> int: ...

    async def status(self, shard: ShardId) -> ShardStatus: ...


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that a call may take."""

    call_s: float = 60.0  # a whole call that is not a chat
    first_event_s: float = 60.0  # from sending a chat to its first token
    next_event_s: float = 30.0  # between two events of a chat
    status_s: float = 2.0


class ShardClient:
    """`Shards` over the shard deployment's handle, whose router is `PinnedRouter`."""

    def __init__(self, handle: Any, deadlines: Deadlines) -> None:
        """`handle`: ray.serve.handle.DeploymentHandle of the shard deployment."""
        self._handle = handle
        self._deadlines = deadlines

    async def chat(self, shard: ShardId, call: ChatCall) -> AsyncGenerator[ChatEvent, None]:
        """The shard's events as they come. Closing the generator early aborts the generation in the shard."""
        response = self._handle.options(session_id=shard, method_name="chat", stream=True).remote(call)
        wait_s = self._deadlines.first_event_s
        finished = False
        try:
            while True:
                try:
                    async with asyncio.timeout(wait_s):
                        event = await anext(response)
                except StopAsyncIteration:
                    finished = True
                    return
                except Exception as error:
                    raise _translated(error, shard, wait_s) from error
                except asyncio.CancelledError as cancelled:
                    raise _cancelled_elsewhere(shard) from cancelled
                yield event
                wait_s = self._deadlines.next_event_s
        finally:
            if not finished:
                _abort(response)

    async def add(self, shard: ShardId, call: AddCall) -> tuple[AddedFact, ...]:
        """Store facts; they are durable when this returns."""
        return await self._call(shard, "add", call)  # type: ignore[no-any-return]

    async def list_facts(self, shard: ShardId, call: ListCall) -> FactPage:
        """One page of a user's facts."""
        return await self._call(shard, "list_facts", call)  # type: ignore[no-any-return]

    async def get_fact(self, shard: ShardId, call: FactCall) -> FactView:
        """One fact; raises NotFound."""
        return await self._call(shard, "get_fact", call)  # type: ignore[no-any-return]

    async def delete_fact(self, shard: ShardId, call: FactCall) -> None:
        """Delete one fact; raises NotFound."""
        await self._call(shard, "delete_fact", call)

    async def forget(self, shard: ShardId, call: ForgetCall) -> int:
        """Delete all of a user's facts; returns how many there were."""
        return await self._call(shard, "forget", call)  # type: ignore[no-any-return]

    async def status(self, shard: ShardId) -> ShardStatus:
        """What the shard says of itself now."""
        return await self._call(shard, "status", deadline_s=self._deadlines.status_s)  # type: ignore[no-any-return]

    async def _call(self, shard: ShardId, method: str, *args: object, deadline_s: float | None = None) -> Any:
        wait_s = self._deadlines.call_s if deadline_s is None else deadline_s
        response = self._handle.options(session_id=shard, method_name=method, stream=False).remote(*args)
        finished = False
        try:
            async with asyncio.timeout(wait_s):
                result = await response
            finished = True
            return result
        except Exception as error:
            raise _translated(error, shard, wait_s) from error
        except asyncio.CancelledError as cancelled:
            raise _cancelled_elsewhere(shard) from cancelled
        finally:
            if not finished:
                _abort(response)


def _abort(response: Any) -> None:
    with contextlib.suppress(Exception):  # cancel() raises the call's own error where it has failed already
        response.cancel()


def _translated(error: Exception, shard: ShardId, wait_s: float) -> MemshardError:
    if isinstance(error, TimeoutError) and not isinstance(error, MemshardError):
        return DeadlineExceeded(f"The shard did not answer within {wait_s:g} s.", shard=shard)
    return as_memshard_error(error, shard)


def _cancelled_elsewhere(shard: ShardId) -> BaseException:
    """Ray reports a task that was cancelled at the shard's end as if we had been cancelled ourselves."""
    task = asyncio.current_task()
    if task is not None and task.cancelling() > 0:
        return asyncio.CancelledError()
    return ShardGone(f"Shard {shard} dropped this request.", shard=shard, certain=False)
