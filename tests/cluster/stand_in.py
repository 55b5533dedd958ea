"""`memshard serve` with a stand-in for the application: `python stand_in.py healthy|refused`.

The real bring-up, with everything but the engines: settings from the environment, embedded Redis, Ray, Serve, signals.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from rich.console import Console

from cluster import cli, models
from cluster.serve import run
from cluster.settings import Settings
from sharding.errors import StartupError

KIND = sys.argv[1]
api = FastAPI()


class Gateway:
    """Answers as a ready gateway does; leaves a child behind, as an engine that lost its replica would."""

    def __init__(self, kind: str, redis_url: str) -> None:
        if kind == "refused":
            raise StartupError("The model's rotary embedding changes with the length; it cannot be served exactly")
        self.redis_url = redis_url
        self.child = subprocess.Popen(["sleep", "600"], start_new_session=True)

    async def __call__(self, request: Any) -> dict[str, str]:
        return {"status": "ready", "redis_url": self.redis_url}


def build(settings: Settings, *, redis_url: str, model_path: Path, embedding_path: Path) -> serve.Application:
    """Same signature as `cluster.app.build`."""
    deployment = serve.deployment(
        Gateway, name="gateway", graceful_shutdown_timeout_s=1, ray_actor_options={"num_cpus": 0}
    )
    return deployment.bind(KIND, redis_url)


def stand_in_serve() -> None:
    models.prepare_language_model = lambda *_: Path("/nonexistent")  # 20 s of work that this is not about
    run(Settings.from_environment(), Console(), build)


if __name__ == "__main__":
    cli.app.registered_commands.clear()
    cli.app.command()(stand_in_serve)
    sys.argv = sys.argv[:1]
    cli.main()
