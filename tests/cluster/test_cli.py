"""The command: failures are one line and a non-zero status, and `--help` imports nothing heavy."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster import cli


def memshard(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from cluster.cli import main; main()", *arguments],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def assert_one_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    for part in ("memshard: ", *parts):
        assert part in lines[0]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_serve_on_a_port_in_use_is_one_line(taken_port: int, tmp_path: Path) -> None:
    done = memshard("serve", "--port", str(taken_port), "--state-dir", str(tmp_path))
    assert_one_line(done, f"Port {taken_port} of 127.0.0.1 is in use")
    assert list(tmp_path.iterdir()) == []


def test_serve_with_a_bad_setting_is_one_line() -> None:
    assert_one_line(memshard("serve", MEMSHARD_SHARDS="none"), "MEMSHARD_SHARDS is 'none'")


def test_serve_with_a_missing_model_is_one_line(tmp_path: Path) -> None:
    done = memshard("serve", "--port", "18999", "--model", str(tmp_path / "gone"))
    assert_one_line(done, f"MEMSHARD_MODEL is {tmp_path}/gone, and there is no such directory")


def test_serve_with_too_little_memory_is_one_line(tmp_path: Path) -> None:
    done = memshard("serve", "--port", "18999", "--state-dir", str(tmp_path), MEMSHARD_KV_CACHE_BYTES=str(1 << 50))
    assert_one_line(done, "memory")


@pytest.mark.parametrize("command", ["status", "canary", "demo"])
def test_a_client_command_without_a_server_is_one_line(command: str) -> None:
    assert_one_line(memshard(command, "--url", "http://127.0.0.1:9"), "No Memshard answers at http://127.0.0.1:9")


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from cluster import cli\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(cli.app, ['--help']).exit_code == 0\n"
        "sys.exit(', '.join({'ray', 'torch', 'vllm', 'transformers', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def _registered(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = EntryPoint("extra", value, cli.COMMANDS)
    monkeypatch.setattr(cli, "entry_points", lambda group: [point])


def test_a_command_of_another_package_joins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "extra_commands.py").write_text(
        "import typer\napp = typer.Typer()\n@app.command()\ndef hello() -> None:\n    typer.echo('hello')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    _registered(monkeypatch, "extra_commands:app")
    assert "extra" in CliRunner().invoke(cli.app, ["--help"]).output
    assert CliRunner().invoke(cli.app, ["extra", "hello"]).output == "hello\n"


@pytest.mark.parametrize("value", ["absent_package:app", "absent_package.commands:app"])
def test_a_command_whose_package_is_absent_breaks_nothing(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    _registered(monkeypatch, value)
    shown = CliRunner().invoke(cli.app, ["--help"])
    assert shown.exit_code == 0
    assert "extra" not in shown.output
    assert CliRunner().invoke(cli.app, ["extra"]).exit_code == 2
