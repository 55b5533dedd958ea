"""The `memshard` command. Every expected failure is one line on stderr and exit status 1.

Commands of other packages join through the entry point group `memshard.commands` (a name and a typer app); they are
imported when named, as is everything heavy, so that `memshard --help` answers at once.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup
from typer.main import get_group

from cluster.processes import INTERRUPTED, leave
from cluster.settings import Settings
from sharding.errors import MemshardError

COMMANDS = "memshard.commands"
OWN = [
    EntryPoint("keys", "cluster.keys:app", COMMANDS),
    EntryPoint("tenants", "cluster.tenants:app", COMMANDS),
]
"""Groups of our own that are imported when named, too."""

FAILED = 1


class CommandsOfPackages(TyperGroup):
    """Our own commands, and those that installed packages register. One whose package is absent is not there."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *(name for name in _registered() if name not in self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and (point := _registered().get(cmd_name)) is not None:
            group = get_group(point.load())
            group.name = cmd_name  # what `--help` shows
            self.add_command(group)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=CommandsOfPackages,
    help="Serve an LLM that remembers each user, without prefilling what it remembers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Url = Annotated[str | None, typer.Option("--url", help="Address of the gateway; by default that of the settings.")]
StateDir = Annotated[Path | None, typer.Option(help="Directory of models, embedded Redis and logs.")]
Model = Annotated[Path | None, typer.Option(help="Directory of the language model; by default the packaged one.")]


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port to listen on.")] = None,
    shards: Annotated[int | None, typer.Option(help="Number of shard replicas.")] = None,
    model: Model = None,
    redis_url: Annotated[str | None, typer.Option(help="A Redis to use instead of the embedded one.")] = None,
    state_dir: StateDir = None,
) -> None:
    """Serve on this machine until Ctrl-C. Options win over the MEMSHARD_* variables of the environment."""
    settings = Settings.from_environment(
        host=host, port=port, shards=shards, model=model, redis_url=redis_url, state_dir=state_dir
    )
    from cluster.serve import run

    console = Console()
    try:
        run(settings, console)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    finally:
        console.show_cursor()
    console.print("Stopped")


@app.command()
def prepare(state_dir: StateDir = None) -> None:
    """Prepare the packaged language model (once) and print where it is."""
    from cluster.models import prepare_language_model

    console = Console()
    path = prepare_language_model(Settings.from_environment(state_dir=state_dir), console.print)
    console.print(str(path), soft_wrap=True, highlight=False)


@app.command()
def status(url: Url = None) -> None:
    """Show the shards of a running server: users, facts, bytes by tier, load."""
    from cluster.status import show

    show(_address(url), Console())


@app.command()
def migrate(
    user: Annotated[str, typer.Argument(help="The user's id.")],
    shard: Annotated[str, typer.Argument(help="The shard to move to, as `memshard status` names it.")],
    url: Url = None,
) -> None:
    """Move a user of a running server to another shard. Reads go on; writes wait for the last part of the copy."""
    from cluster.moves import migrate

    migrate(_address(url), user, shard, Console())


@app.command()
def drain(
    shard: Annotated[str, typer.Argument(help="The shard to empty, as `memshard status` names it.")], url: Url = None
) -> None:
    """Move everybody away from a shard of a running server, which takes no new users from then on."""
    from cluster.moves import drain

    drain(_address(url), shard, Console())


@app.command()
def rebuild(user: Annotated[str, typer.Argument(help="The user's id.")], url: Url = None) -> None:
    """Encode anew, now, what corrections left stale of a user's memory on a running server."""
    from cluster.moves import rebuild

    rebuild(_address(url), user, Console())


@app.command()
def canary(url: Url = None) -> None:
    """Have a running server's shards prove again that the model answers as well from injected memory as from text."""
    from cluster.status import show_canary

    show_canary(_address(url), Console())


@app.command()
def demo(url: Url = None) -> None:
    """Tell a running server about two people, ask about them, and time the answers with and without injection."""
    from cluster.demo import play

    play(_address(url), Console())


def main() -> None:
    """Entry point of the console script."""
    status: object = FAILED
    try:
        app()
    except MemshardError as error:
        Console(stderr=True).print(f"memshard: {error.message}", soft_wrap=True, markup=False, highlight=False)
    except SystemExit as ended:
        status = ended.code or 0
    leave(status if isinstance(status, int) else FAILED)


def _address(url: str | None) -> str:
    if url is not None:
        return url.rstrip("/")
    return Settings.from_environment().base_url


def _registered() -> dict[str, EntryPoint]:
    """Commands of installed packages by name, without importing the modules that hold them."""
    return {point.name: point for point in [*OWN, *entry_points(group=COMMANDS)] if _exists(point.module)}


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False
