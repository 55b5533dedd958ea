"""One Ray node in this process' care, and the Serve application on it.

`memshard serve` runs a whole cluster on one machine; on Kubernetes, KubeRay starts the nodes and none of this runs.
The node is private: its own temporary directory (short, because Ray's unix sockets live in it and their paths are
limited to 107 bytes), no dashboard, no usage reports.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import processes
from cluster.models import OFFLINE
from cluster.settings import Settings
from sharding.errors import StartupError

if TYPE_CHECKING:
    from ray.serve.schema import ServeStatus

APPLICATION = "memshard"
OBJECT_STORE_BYTES = 256 << 20  # messages only; tensors never pass through it
RAY_STOP_DEADLINE_S = 10.0
ENVIRONMENT = OFFLINE | {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # Ray's default for workers, and so for our engines, is 15: whatever else runs on the machine would starve them.
    "RAY_worker_niceness": "0",
    # A replica that is killed takes its engine along: vLLM's engine core does not watch its parent, so Ray ends the
    # worker's process group. Its default in this version, said because nothing else would end it.
    "RAY_process_group_cleanup_enabled": "1",
}

Progress = Callable[[str], None]


class RayNode:
    """A running node; `stop` ends it and keeps its logs in `settings.state_dir/logs`.

    Raises:
        StartupError: Ray does not start.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._serves = False  # only then is there a request that a stop has to wait for
        self._directory = Path(tempfile.mkdtemp(prefix="memshard-", dir="/tmp"))
        os.environ.update(ENVIRONMENT)  # inherited by every process of the node
        import ray

        hush()
        try:
            ray.init(
                address="local",
                # Logical: threads are limited by the shards themselves, and more shards than cores is a choice.
                num_cpus=max(os.cpu_count() or 1, settings.most_shards) + settings.gateways,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                namespace=settings.namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(self._directory),
            )
        except BaseException as failure:
            self.stop()
            if isinstance(failure, Exception):  # Ray raises bare ones, too
                raise StartupError(f"Ray did not start: {_last_line(str(failure))}") from failure
            raise
        processes.listen_again()

    def deploy(self, application: Any, progress: Progress) -> None:
        """Start Serve with the gateway's address and `application` on it; return when all of it runs.

        Raises:
            StartupError: a replica refuses to start, or the deadline runs out; with the replica's reason.
        """
        from ray import serve

        give_up = time.monotonic() + self._settings.start_deadline_s
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": self._settings.host, "port": self._settings.port},
            logging_config={"log_level": "WARNING"},
        )
        serve.run_many(
            [serve.RunTarget(application, name=APPLICATION, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        shown = ""
        while True:
            status = serve.status()
            if refusal := refusal_in(status):
                raise StartupError(refusal)
            state = summary(status)
            if state != shown:
                progress(state)
                shown = state
            if status.applications[APPLICATION].status == "RUNNING":
                self._serves = True
                return
            if time.monotonic() > give_up:
                raise StartupError(
                    f"The cluster was not ready within {self._settings.start_deadline_s:.0f} s ({state}); "
                    f"its logs are in {self.logs}"
                )
            time.sleep(0.2)

    @property
    def logs(self) -> Path:
        """Where the logs are once the node has stopped."""
        return self._settings.state_dir / "logs"

    def stop(self) -> None:
        """Stop Serve (running requests get `stop_deadline_s`), then Ray. What hangs is left to the caller to kill."""
        import ray
        from ray import serve

        if ray.is_initialized():
            with _silence():  # Ray reports as errors that processes it has just stopped are gone
                if self._serves:
                    _within(self._settings.stop_deadline_s, serve.shutdown)
                if not _within(RAY_STOP_DEADLINE_S, ray.shutdown):
                    # An interrupt in the middle of a call can leave a lock held for ever, and Ray's own handler would
                    # wait for it again when the interpreter exits.
                    atexit.unregister(ray.shutdown)
        self._keep_logs()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _keep_logs(self) -> None:
        shutil.rmtree(self.logs, ignore_errors=True)
        for logs in self._directory.glob("session_2*/logs"):
            shutil.copytree(logs, self.logs, dirs_exist_ok=True, ignore_dangling_symlinks=True)


def hush() -> None:
    """From `ray.init` on, Ray writes a paragraph to this process' stdout for each process of the cluster that dies,
    `log_to_driver` or not. Its logs have it."""
    from ray._private import worker

    worker.print_to_stdstream = lambda *_, **__: None


def summary(status: ServeStatus) -> str:
    """How many replicas of which deployment run, in one line."""
    application = status.applications.get(APPLICATION)
    if application is None or not application.deployments:
        return "starting Serve"
    parts = []
    for name, deployment in sorted(application.deployments.items()):
        total = sum(deployment.replica_states.values())
        parts.append(f"{name} {deployment.replica_states.get('RUNNING', 0)}/{total}")
    return ", ".join(parts)


def refusal_in(status: ServeStatus) -> str | None:
    """Why the application will not come up, or None while it may.

    Serve starts a replica that failed again, thrice. A `StartupError` is final at the first.
    """
    application = status.applications.get(APPLICATION)
    if application is None:
        return None
    messages = [application.message, *(d.message for d in application.deployments.values())]
    for message in messages:
        if found := re.search(r"^.*\bStartupError: (.+)$", message, re.MULTILINE):
            return found[1].strip()
    if application.status == "DEPLOY_FAILED":
        return f"A replica did not start: {_last_line(next(filter(None, reversed(messages)), 'no reason given'))}"
    return None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()


@contextmanager
def _silence() -> Iterator[None]:
    """Drop what this process writes to stdout and stderr, Ray's C++ core included."""
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        sys.stdout.flush()
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
        sys.stdout.flush()
    finally:
        for target, saved in enumerate(kept, start=1):
            os.dup2(saved, target)
        for descriptor in (*kept, nowhere):
            os.close(descriptor)


def _within(deadline_s: float, action: Callable[[], object]) -> bool:
    """Run `action` for at most `deadline_s`; one that hangs is abandoned with its thread. Whether it ended."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(deadline_s)
    return not thread.is_alive()
