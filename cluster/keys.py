"""`memshard keys`: make, list and revoke API keys, in the Redis that the settings name.

Where that is the embedded one, it may be in use by a running server, which is then asked, or by nobody: then it is
started for as long as this takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from cluster.embedded_redis import ADDRESS, EmbeddedRedis
from cluster.settings import Settings
from sharding.api_keys import KeyStore, Role
from sharding.client import connect
from sharding.errors import InvalidRequest, NotFound, StartupError
from sharding.keys import KeySpace
from sharding.scopes import TENANT
from sharding.sealing import new_secret

T = TypeVar("T")

app = typer.Typer(help="API keys: who may call, for which tenant.", no_args_is_help=True)


@app.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Whose memories the key opens; one that is new is made by this.")],
    role: Annotated[
        Role, typer.Option(help="read: chats and searches; write: changes, too; admin: status, too.")
    ] = "write",
    label: Annotated[str, typer.Option(help="What the key is for, for the list.")] = "",
) -> None:
    """Make a key and print it, once: only its hash is kept."""
    if not TENANT.fullmatch(tenant):
        raise InvalidRequest("A tenant's name has 1 to 64 of the characters a-z, A-Z, 0-9, '.', '_' and '-'")
    key, known = with_key_store(lambda store: store.create(tenant, role, label))
    Console(stderr=True).print(f"Key {known.id} of the role {known.role} for the tenant {known.tenant}:", markup=False)
    Console().print(key, soft_wrap=True, markup=False, highlight=False)


@app.command("list")
def list_keys() -> None:
    """Show every key's id, tenant, role, label and age; not the keys, which nobody has."""
    table = Table("id", "tenant", "role", "label", "created")
    for key in with_key_store(lambda store: store.list()):
        table.add_row(key.id, key.tenant, key.role, key.label, key.created_at)
    Console().print(table)


@app.command()
def revoke(id: Annotated[str, typer.Argument(help="The key's id, as `list` shows it.")]) -> None:
    """Take a key back; running gateways know within seconds."""
    if not with_key_store(lambda store: store.revoke(id)):
        raise NotFound(f"There is no key with the id {id}; `memshard keys list` shows them")
    Console().print(f"Key {id} is revoked", markup=False)


@app.command()
def secret() -> None:
    """Print a new secret for MEMSHARD_ENCRYPTION_KEY. Keep it: without it, what was encrypted with it is lost."""
    Console().print(new_secret(), soft_wrap=True, markup=False, highlight=False)


def any_key(redis_url: str, namespace: str) -> bool:
    """Whether there is a key at all."""
    return bool(_ask(redis_url, namespace, lambda store: store.list()))


def with_key_store(use: Callable[[KeyStore], Awaitable[T]]) -> T:
    settings = Settings.from_environment()
    with _redis(settings) as url:
        return _ask(url, settings.namespace, use)


def _ask(url: str, namespace: str, use: Callable[[KeyStore], Awaitable[T]]) -> T:
    async def ask() -> T:
        redis = connect(url)
        try:
            return await use(KeyStore(redis, KeySpace(namespace, "")))
        finally:
            await redis.aclose()

    return asyncio.run(ask())


@contextmanager
def _redis(settings: Settings) -> Iterator[str]:
    if settings.redis_url is not None:
        yield settings.redis_url
        return
    directory = settings.state_dir / "redis"
    try:
        server = EmbeddedRedis(directory)
    except StartupError:
        if not (directory / ADDRESS).exists():
            raise
        yield (directory / ADDRESS).read_text()
        return
    with server:
        server.wait_ready()
        yield server.url
