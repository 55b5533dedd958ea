"""One hop from the gateway to one shard: pinned, with a deadline, cancelled when the caller goes away.

`Shards` is what the gateway needs; `ShardClient` is it over a Serve handle (tests have one in their own process).
Nothing is retried here, that needs the directory: see `owner_calls.py`. Errors leave as members of our tree.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Protocol, TypeVar

from deployments.memory_calls import DrainReport, MemoryCall
from deployments.messages import ChatCall, ChatEvent, ChatFinished, ShardStatus
from deployments.ray_errors import as_memshard_error
from deployments.router import ANY
from deployments.telemetry import carried
from sharding.errors import DeadlineExceeded, MemshardError, ShardGone
from sharding.ids import ShardId, UserId

T = TypeVar("T")


DRAIN_MARGIN_S = 15.0
"""A move that has begun when the time is up still ends."""


class Shards(Protocol):
    """The methods of a shard replica, each called on the shard that is named.

    `deadline_s` is the time left for the whole call, a chat's last token included. All raise members of the error
    tree only; ShardGone, Busy and DeadlineExceeded may come from the way there.
    """

    def chat(self, shard: ShardId, call: ChatCall, deadline_s: float) -> AsyncGenerator[ChatEvent, None]:
        """The shard's events as they come. Closing the generator early aborts the generation in the shard."""

    async def ask(self, shard: ShardId, call: MemoryCall[T], deadline_s: float) -> T:
        """The answer to a call about one owner's memory."""

    async def leave(self, shard: ShardId, user: UserId, deadline_s: float) -> None:
        """Returns when the shard has nothing of a user who is not its own: no fact, chunk, or file on its machine."""

    async def status(self, shard: ShardId, deadline_s: float) -> ShardStatus:
        """What the shard says of itself now."""

    async def drain(self, shard: ShardId, deadline_s: float) -> DrainReport:
        """Takes no new users from now on, and moves its users away until shortly before the deadline."""

    async def metrics(self, shard: ShardId, deadline_s: float) -> str:
        """The shard's numbers and durations, and vLLM's own, in Prometheus' text format."""

    async def prove(self, shard: ShardId, deadline_s: float) -> ShardStatus:
        """The same, after its canary was asked again."""

    async def wake(self, deadline_s: float) -> None:
        """Has a first shard started, where the number of shards may be none; returns when it answers."""


class ShardClient(Shards):
    """`Shards` over the shard deployment's handle, whose router is `PinnedRouter`.

    A shard may raise its errors or return them as values (an expected error that is raised makes Ray write a
    traceback into the shard's log); both leave here as exceptions.
    """

    def __init__(self, handle: Any) -> None:
        """`handle`: ray.serve.handle.DeploymentHandle of the shard deployment."""
        self._handle = handle

    async def chat(self, shard: ShardId, call: ChatCall, deadline_s: float) -> AsyncGenerator[ChatEvent, None]:
        response = self._handle.options(session_id=shard, method_name="chat", stream=True).remote(call, carried())
        ends_at = asyncio.get_running_loop().time() + deadline_s
        finished = False
        try:
            while True:
                try:
                    async with asyncio.timeout_at(ends_at):
                        event = _value(await anext(response))
                except StopAsyncIteration:
                    finished = True
                    return
                except Exception as error:
                    raise _translated(error, shard) from error
                except asyncio.CancelledError as cancelled:
                    raise _cancelled_elsewhere(shard) from cancelled
                finished = isinstance(event, ChatFinished)  # nothing is left to abort
                yield event
        finally:
            if not finished:
                _abort(response)

    async def ask(self, shard: ShardId, call: MemoryCall[T], deadline_s: float) -> T:
        return await self._call(shard, "ask", deadline_s, call, carried())  # type: ignore[no-any-return]

    async def leave(self, shard: ShardId, user: UserId, deadline_s: float) -> None:
        await self._call(shard, "leave", deadline_s, user)

    async def status(self, shard: ShardId, deadline_s: float) -> ShardStatus:
        return await self._call(shard, "status", deadline_s)  # type: ignore[no-any-return]

    async def drain(self, shard: ShardId, deadline_s: float) -> DrainReport:
        move_s = max(0.0, deadline_s - DRAIN_MARGIN_S)
        return await self._call(shard, "drain", deadline_s, move_s)  # type: ignore[no-any-return]

    async def metrics(self, shard: ShardId, deadline_s: float) -> str:
        return await self._call(shard, "metrics", deadline_s)  # type: ignore[no-any-return]

    async def prove(self, shard: ShardId, deadline_s: float) -> ShardStatus:
        return await self._call(shard, "prove", deadline_s)  # type: ignore[no-any-return]

    async def wake(self, deadline_s: float) -> None:
        await self._call(ANY, "status", deadline_s)

    async def _call(self, shard: ShardId, method: str, deadline_s: float, *args: object) -> Any:
        response = self._handle.options(session_id=shard, method_name=method, stream=False).remote(*args)
        finished = False
        try:
            async with asyncio.timeout(deadline_s):
                result = await response
            finished = True
            return _value(result)
        except Exception as error:
            raise _translated(error, shard) from error
        except asyncio.CancelledError as cancelled:
            raise _cancelled_elsewhere(shard) from cancelled
        finally:
            if not finished:
                _abort(response)


def _value(result: Any) -> Any:
    if isinstance(result, MemshardError):
        raise result
    return result


def _abort(response: Any) -> None:
    with contextlib.suppress(Exception):  # cancel() raises the call's own error where it has failed already
        response.cancel()


def _translated(error: Exception, shard: ShardId) -> MemshardError:
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("The request took longer than it may.", shard=shard)
    return as_memshard_error(error, shard)


def _cancelled_elsewhere(shard: ShardId) -> BaseException:
    """Ray reports a task that was cancelled at the shard's end as if we had been cancelled ourselves."""
    task = asyncio.current_task()
    if task is not None and task.cancelling() > 0:
        return asyncio.CancelledError()
    return ShardGone(f"Shard {shard} dropped this request.", shard=shard, certain=False)
