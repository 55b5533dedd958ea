"""`memshard serve`: everything up, one address to talk to, everything down again.

`run` is the whole story in order; each step below it undoes itself. What it refuses: to leave a process behind,
however it ends (see `cluster/processes.py`), and to hang on a replica that will never start.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
from rich.console import Console

from cluster import models, preflight, processes
from cluster.embedded_redis import EmbeddedRedis
from cluster.keys import any_key
from cluster.settings import Settings
from sharding.errors import StartupError

Build = Callable[..., Any]
"""`cluster.app.build`: (settings, *, redis_url, model_path, embedding_path) to a Serve application."""


def run(settings: Settings, console: Console, build: Build | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM, then stop all of it; a second signal kills at once.

    Raises:
        StartupError: the cluster cannot start; whatever had started is stopped again.
        KeyboardInterrupt: the stop was asked for before the cluster was ready.
    """
    began = time.monotonic()
    preflight.check(settings)
    processes.adopt_orphans()
    with ExitStack() as running, _reporting(console) as say:
        running.enter_context(processes.interruptible())
        running.callback(processes.end_descendants)  # runs last: whatever the steps below have left
        redis = running.enter_context(_durable_store(settings))
        if settings.keys_required:
            check_keys(settings, settings.redis_url or _ready(redis))
        model_path = models.prepare_language_model(settings, say)
        embedding_path = models.embedding_model(settings)

        say("Starting Ray")
        from cluster.ray_node import RayNode  # imports ray: 2 s that a refused start does not pay

        node = RayNode(settings)
        running.callback(node.stop)
        redis_url = settings.redis_url or _ready(redis)
        application = (build or _product())(
            settings, redis_url=redis_url, model_path=model_path, embedding_path=embedding_path
        )
        say(f"Starting {max(1, settings.shards)} shards")
        node.deploy(application, say)
        _wait_ready(settings)
        say(f"Ready after {time.monotonic() - began:.0f} s")
        with suppress(KeyboardInterrupt):
            announce(settings, console)
            _keep(redis)
        say("Stopping")


def check_keys(settings: Settings, redis_url: str) -> None:
    """Refuse to start where requests need keys and there is none: nobody could call.

    Raises:
        StartupError: so it is.
    """
    if not any_key(redis_url, settings.namespace):
        why = "" if settings.is_loopback else f" because others can call {settings.host}"
        raise StartupError(
            f"Requests need API keys{why}, and there is none; make one with `memshard keys create TENANT`"
        )


def announce(settings: Settings, console: Console) -> None:
    """Print the address and two commands that work as pasted."""
    remember = {
        "user_id": "ada",
        "messages": [{"role": "user", "content": "My dog is called Biscuit, and he is afraid of seagulls."}],
        "infer": False,
    }
    ask = {
        "model": models.model_name(settings),
        "user_id": "ada",
        "messages": [{"role": "user", "content": "What is the name of my dog?"}],
        "temperature": 0,
    }
    url = settings.base_url
    for line in (
        f"\nMemshard serves {models.model_name(settings)} at {url}\n",
        "Remember:",
        f"  {_curl(url + '/v1/memories', remember)}\n",
        "Ask:",
        f"  {_curl(url + '/v1/chat/completions', ask)}\n",
        "Ctrl-C stops everything.",
    ):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _curl(url: str, body: dict[str, Any]) -> str:
    return f"curl {url} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def _product() -> Build:
    from cluster.app import build

    return build


@contextmanager
def _durable_store(settings: Settings) -> Iterator[EmbeddedRedis | None]:
    """The embedded server, starting up, or None where the settings name another."""
    if settings.redis_url is not None:
        yield None
        return
    with EmbeddedRedis(settings.state_dir / "redis") as server:
        yield server


def _ready(server: EmbeddedRedis | None) -> str:
    assert server is not None
    server.wait_ready()
    return server.url


def _wait_ready(settings: Settings) -> None:
    """Wait until the gateway itself says that it can serve.

    Raises:
        StartupError: it does not within the deadline.
    """
    give_up = time.monotonic() + settings.start_deadline_s
    last = "no answer"
    with httpx.Client(base_url=settings.base_url, timeout=5.0, trust_env=False) as client:
        while time.monotonic() < give_up:
            try:
                answer = client.get("/readyz")
            except httpx.TransportError as failure:
                last = str(failure) or type(failure).__name__
            else:
                if answer.status_code == 200:
                    return
                last = answer.text[:200]
            time.sleep(0.1)
    raise StartupError(f"The gateway did not become ready: {last}")


def _keep(redis: EmbeddedRedis | None) -> None:
    """Block until a signal, and bring the embedded Redis back should it ever end."""
    while True:
        time.sleep(0.5)
        if redis is not None:
            redis.revive()


@contextmanager
def _reporting(console: Console) -> Iterator[Callable[[str], None]]:
    """Say each step as a line; on a terminal a spinner shows that the last one still goes on."""
    with console.status("Checking this machine") as spinner:

        def say(step: str) -> None:
            console.print(f"==> {step}", markup=False, highlight=False)
            spinner.update(step)
            if step.startswith("Ready"):
                spinner.stop()

        yield say
