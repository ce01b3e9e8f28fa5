"""A real SGLang server on the CPU, for the tests marked ``sglang``.

``ASYNC_WSYNC_SGLANG_PYTHON`` names the Python that has SGLang; by default the one that runs the tests.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
PYTHON = os.environ.get("ASYNC_WSYNC_SGLANG_PYTHON", sys.executable)
START_SECONDS = 240.0


def environment(**more: str) -> dict[str, str]:
    """Of the server and of transformers: only they see the stand-ins."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONWARNINGS", "PYTHONDEVMODE")}
    return {
        **clean,
        "PYTHONPATH": str(HERE / "standins"),
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def model_tool(*arguments: str) -> Any:
    """What ``model.py`` prints, decoded."""
    done = subprocess.run(
        [PYTHON, str(HERE / "model.py"), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else None


def greedy(checkpoint: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers generates."""
    tokens: list[int] = model_tool("greedy", str(checkpoint), str(count), *map(str, prompt))
    return tokens


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SGLangProcess:
    """One server. ``group_timeout``: seconds for its update groups, which its API has no field for."""

    def __init__(self, model: Path, log: Path, *options: str, tp: int = 1, group_timeout: float = 60.0) -> None:
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        more = {"SGLANG_STANDIN_GROUP_TIMEOUT": str(group_timeout), "SGLANG_STANDIN_UNPINNED": "1"}
        if tp > 1:
            more |= {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp))), "TORCHDYNAMO_DISABLE": "1"}
        command = [
            *(PYTHON, "-m", "sglang.launch_server", "--model-path", str(model), "--skip-tokenizer-init"),
            *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--grammar-backend", "none", "--disable-overlap-schedule", "--max-total-tokens", "4096"),
            *("--max-running-requests", "8", "--mem-fraction-static", "0.5", "--dtype", "float32"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--tp-size", str(tp), *options),
        ]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=environment(**more), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended:\n{self.log.read_text()[-4000:]}")
            try:
                if httpx.get(f"{self.url}/health_generate", timeout=5.0, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise AssertionError(f"not ready in {START_SECONDS:g} s:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """The whole session: server, scheduler and detokenizer."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(timeout=30.0)


async def generate(url: str, prompt: list[int], count: int, *, timeout: float = 120.0, **more: Any) -> dict[str, Any]:
    """The whole answer: ``output_ids``, and ``meta_info`` with ``weight_versions``."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
        **more,
    }
    async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
        answer = await client.post(f"{url}/generate", json=body)
    answer.raise_for_status()
    data: dict[str, Any] = answer.json()
    return data
