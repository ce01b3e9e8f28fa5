"""``async-wsync push`` as a command, against small servers with SGLang's manners."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from async_wsync.cli.main import main
from tests.support.sglang_updates import tensors
from tests.support.small_sglang import SmallSGLang

Run = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def servers() -> Iterator[list[SmallSGLang]]:
    weights = [{name: torch.zeros_like(tensor) for name, tensor in tensors().items()} for _ in range(2)]
    with SmallSGLang(weights=weights[0], version="6") as one, SmallSGLang(weights=weights[1], version="9") as two:
        yield [one, two]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(tensors(2), tmp_path / "model.safetensors")
    return tmp_path


def push(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as a person runs it."""
    return subprocess.run(
        [sys.executable, "-m", "async_wsync", "push", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """In this process: starting one takes seconds."""

    def push_here(*arguments: Any) -> subprocess.CompletedProcess[str]:
        code = main(["push", *map(str, arguments)])
        said = capsys.readouterr()
        return subprocess.CompletedProcess([], code, said.out, said.err)

    return push_here


def to(servers: list[SmallSGLang]) -> list[str]:
    return [*(word for server in servers for word in ("--sglang", server.url)), "--master-address", "127.0.0.1"]


def test_a_checkpoint_reaches_every_server_with_the_next_version(
    servers: list[SmallSGLang], checkpoint: Path, tmp_path: Path
) -> None:
    done = push(checkpoint, *to(servers), "--backend", "gloo", "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    for server in servers:
        assert all(torch.equal(server.weights[name], tensor) for name, tensor in tensors(2).items())
        assert server.version == "10", "one more than the highest"
        assert server.paused is None
        assert server.url in done.stdout
        assert server.groups == {}, "it left the group"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["version"] == 10
    assert report["num_tensors"] == 5


def test_a_dry_run_checks_and_sends_nothing(servers: list[SmallSGLang], checkpoint: Path, run: Run) -> None:
    done = run(checkpoint, *to(servers), "--dry-run", "--json", "-")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert all(engine["fits"] for engine in answer["engines"].values())

    del servers[1].weights["model.scale"]
    done = run(checkpoint, *to(servers), "--dry-run")
    assert done.returncode == 3
    assert f"{servers[0].url}: fits" in done.stdout
    assert "model.scale" in done.stdout
    assert "nothing was sent" in done.stdout
    for server in servers:
        assert not {"/pause_generation", "/begin_weight_update", "/init_weights_update_group"} & set(server.paths())


def test_a_refused_checkpoint_has_its_own_exit_code_and_changes_nothing(
    servers: list[SmallSGLang], checkpoint: Path, run: Run
) -> None:
    del servers[1].weights["model.scale"]
    done = run(checkpoint, *to(servers), "--backend", "gloo", "--quiet")
    assert done.returncode == 3
    assert servers[1].url in done.stderr
    assert "model.scale" in done.stderr
    assert "What to do" in done.stderr
    assert [server.version for server in servers] == ["6", "9"]
    assert all(float(tensor.abs().sum()) == 0 for server in servers for tensor in server.weights.values())


def test_a_partial_checkpoint_needs_servers_on_the_version_that_was_pushed_last(
    servers: list[SmallSGLang], tmp_path: Path, run: Run
) -> None:
    part = {"model.scale": tensors(2)["model.scale"]}
    save_file(part, tmp_path / "model.safetensors")
    done = run(tmp_path, *to(servers), "--partial", "--dry-run")
    assert done.returncode == 3
    assert f"{servers[1].url}: fits" in done.stdout
    done = run(tmp_path, *to(servers), "--partial", "--backend", "gloo", "--quiet")
    assert done.returncode == 3
    assert f"{servers[0].url}: the update" in done.stderr
    assert "without --partial" in done.stderr
    assert [server.version for server in servers] == ["6", "9"]
    assert all("/pause_generation" not in server.paths() for server in servers)

    servers[0].version = "9"
    done = run(tmp_path, *to(servers), "--partial", "--backend", "gloo", "--quiet")
    assert done.returncode == 0, done.stderr
    for server in servers:
        assert server.version == "10"
        assert torch.equal(server.weights["model.scale"], part["model.scale"])
        assert float(server.weights["model.norm.weight"].abs().sum()) == 0


def test_a_server_that_is_not_there_is_named_with_advice(
    servers: list[SmallSGLang], checkpoint: Path, run: Run
) -> None:
    done = run(checkpoint, "--sglang", servers[0].url, "--sglang", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "http://127.0.0.1:9" in done.stderr
    assert "What to do" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_key_comes_from_the_environment(
    servers: list[SmallSGLang], checkpoint: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers[0].api_key = "secret"
    monkeypatch.setenv("ASYNC_WSYNC_API_KEY", "secret")
    done = run(checkpoint, "--sglang", servers[0].url, "--dry-run")
    assert done.returncode == 0, done.stderr
    monkeypatch.delenv("ASYNC_WSYNC_API_KEY")
    done = run(checkpoint, "--sglang", servers[0].url, "--dry-run")
    assert done.returncode == 1
    assert "api_key" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--sglang URL or --vllm URL"),
        (["--sglang", "localhost:30000"], "http://"),
        (["--sglang", "http://127.0.0.1:9", "--dtype", "float99"], "float99"),
        (["--vllm", "http://127.0.0.1:9,two"], "URL,RANKS"),
    ],
)
def test_wrong_usage_is_exit_code_2(checkpoint: Path, run: Run, arguments: list[str], words: str) -> None:
    done = run(checkpoint, *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_checkpoint_that_is_none_is_wrong_usage(tmp_path: Path, run: Run) -> None:
    done = run(tmp_path, "--sglang", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
