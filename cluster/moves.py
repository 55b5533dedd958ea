"""`memshard migrate`, `memshard drain` and `memshard rebuild`: an operator moves users of a running server, or has a
memory rebuilt."""

from __future__ import annotations

from rich.console import Console

from cluster.client import gateway
from sharding.errors import MemshardError


def migrate(url: str, user: str, shard: str, console: Console) -> None:
    """Move one user. Raises MemshardError where the user stays where they were."""
    with gateway(url) as client:
        answer = client.post("/v1/admin/moves", json={"user_id": user, "shard": shard})
        answer.raise_for_status()
    report = answer.json()
    if report["end"] != "moved":
        raise MemshardError(f"{user} was not moved ({report['end']}); the server's log says why")
    console.print(
        f"{user} is on {report['placement']['shard']} now. Writes waited {1000 * report['paused_s']:.0f} ms, reads "
        f"{1000 * report['closed_s']:.0f} ms.",
        soft_wrap=True,
        highlight=False,
    )


def drain(url: str, shard: str, console: Console) -> None:
    """Move everybody away, in as many calls as it takes. Raises MemshardError where that gets no further."""
    moved = 0
    with gateway(url) as client, console.status(f"Draining {shard}"):
        while True:
            answer = client.post("/v1/admin/drains", json={"shard": shard})
            answer.raise_for_status()
            report = answer.json()
            moved += report["moved"]
            if not report["left"]:
                break
            if not report["moved"]:
                raise MemshardError(f"{report['left']} users are still on {shard}; the server's log says why")
    console.print(f"{moved} users were moved away from {shard}.", soft_wrap=True, highlight=False)


def rebuild(url: str, user: str, console: Console) -> None:
    """Encode anew what corrections left stale of one user's memory. Raises what `client.gateway` raises."""
    with gateway(url) as client:
        answer = client.post("/v1/admin/rebuilds", json={"user_id": user})
        answer.raise_for_status()
    done = answer.json()
    console.print(
        f"{done['facts']} facts of {user} were encoded anew, with prefills of {done['tokens']} tokens: "
        f"{100 * done['share']:.0f} % of a full build.",
        soft_wrap=True,
        highlight=False,
    )
