"""`memshard tenants delete`: all of a tenant goes, in one call to a running server."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from cluster.client import gateway
from cluster.keys import with_key_store
from cluster.settings import Settings
from sharding.errors import InvalidRequest
from sharding.scopes import TENANT

app = typer.Typer(help="Tenants: whose API keys open whose memories.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Makes `delete` a command of its own."""


@app.command()
def delete(
    tenant: Annotated[str, typer.Argument(help="Whose users, memories and keys are deleted.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask whether that is meant.")] = False,
    url: Annotated[str | None, typer.Option(help="Address of the gateway; by default that of the settings.")] = None,
) -> None:
    """Delete every user, memory and API key of a tenant from a running server; they are gone when this returns. It
    makes itself a key of the tenant, and so works where `memshard keys` does."""
    if not TENANT.fullmatch(tenant):
        raise InvalidRequest("Name one tenant: 1 to 64 of the characters a-z, A-Z, 0-9, '.', '_' and '-'")
    if not yes:
        typer.confirm(f"Delete all memories and keys of the tenant {tenant}, for good?", abort=True)
    key, known = with_key_store(lambda store: store.create(tenant, "admin", "deletes the tenant"))
    console = Console()
    try:
        address = url or Settings.from_environment().base_url
        with gateway(address, key, timeout_s=None) as client, console.status(f"Deleting {tenant}"):
            answer = client.delete(f"/v1/admin/tenants/{tenant}")
            answer.raise_for_status()
    finally:
        with_key_store(lambda store: store.revoke(known.id))  # where the server did not come to it
    gone = answer.json()
    console.print(
        f"{tenant} is gone: {gone['memories']} memories of {gone['users']} users, and {gone['keys'] - 1} keys.",
        soft_wrap=True,
        highlight=False,
    )
