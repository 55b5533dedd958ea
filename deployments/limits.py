"""What a tenant and a user may do in a minute: requests when they come, tokens when they are known.

A chat's tokens are known when it ends: the one that goes over the limit is answered, the next one is refused. While
Redis is away nobody counts, and nobody is refused for it: those already placed are to be served.
"""

from __future__ import annotations

import logging
import math

from deployments.callers import Caller
from deployments.settings import GatewaySettings
from sharding.errors import RateLimited, Unavailable
from sharding.ids import UserId
from sharding.limits import CountsMinutes, Taken

log = logging.getLogger(__name__)


class Limits:
    """The limits of `settings`; None there is no limit, and costs nothing."""

    def __init__(self, minutes: CountsMinutes, settings: GatewaySettings) -> None:
        self._minutes = minutes
        self._settings = settings

    async def request(self, caller: Caller) -> Taken | None:
        """Counts a request of a tenant. Raises `RateLimited`."""
        limit = self._settings.tenant_requests_per_minute
        return await self._take(f"requests:t:{caller.tenant}", 1, limit, "requests")

    async def user_request(self, owner: UserId | None) -> None:
        """Counts a request that concerns one user. Raises `RateLimited`."""
        if owner is not None:
            await self._take(f"requests:u:{owner}", 1, self._settings.user_requests_per_minute, "requests of this user")

    async def chat(self, caller: Caller, owner: UserId | None) -> None:
        """Before a chat. Raises `RateLimited`, also where the minute's tokens are used up."""
        await self.user_request(owner)
        settings = self._settings
        await self._take(f"tokens:t:{caller.tenant}", 0, settings.tenant_tokens_per_minute, "tokens")
        if owner is not None:
            await self._take(f"tokens:u:{owner}", 0, settings.user_tokens_per_minute, "tokens of this user")

    async def spent(self, caller: Caller, owner: UserId | None, tokens: int) -> None:
        """A chat took so many tokens, prompt and answer."""
        unlimited = 1 << 52  # counted in any case
        if self._settings.tenant_tokens_per_minute is not None:
            await self._take(f"tokens:t:{caller.tenant}", tokens, unlimited, "tokens")
        if owner is not None and self._settings.user_tokens_per_minute is not None:
            await self._take(f"tokens:u:{owner}", tokens, unlimited, "tokens")

    async def _take(self, what: str, cost: int, limit: int | None, named: str) -> Taken | None:
        if limit is None:
            return None
        try:
            taken = await self._minutes.take(what, cost, limit)
        except Unavailable as error:
            log.warning("Nothing is counted against limits: %s", error)
            return None
        if not taken.allowed:
            wait_s = max(1, math.ceil(taken.reset_s))
            raise RateLimited(
                f"{limit} {named} a minute are used up; retry in {wait_s} s.",
                retry_after_s=wait_s,
                limit=limit,
                remaining=taken.left,
            )
        return taken
