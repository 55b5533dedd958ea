"""Loads this package's Lua scripts, which are files so that editors and reviewers see them as code."""

from __future__ import annotations

from importlib import resources

from redis.commands.core import AsyncScript

from sharding.client import RedisClient


def script(redis: RedisClient, *names: str) -> AsyncScript:
    """The files `<name>.lua`, joined in this order into one script; it reaches the server on first use."""
    folder = resources.files("sharding")
    return redis.register_script("\n".join(folder.joinpath(f"{name}.lua").read_text("utf-8") for name in names))
