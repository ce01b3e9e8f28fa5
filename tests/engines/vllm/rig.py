"""Real vLLM engines on the CPU with tiny random models, and what transformers says about the same weights."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from async_wsync.engines.vllm.actor import VLLMRolloutActor

VOCABULARY = 256
MAX_LENGTH = 2048
PROMPT = [1, 2, 3, 4, 5]
SERVER_START_SECONDS = 300.0

# Float32 and wide weights: no near ties that two kernels could break in two ways.
ENGINE_ARGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": MAX_LENGTH,
    "max_num_seqs": 8,
    "dtype": "float32",
}
ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",  # no warm-up
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "RAY_DEDUP_LOGS": "1",
}


def tiny_model(seed: int, *, family: str = "llama", hidden: int = 128, layers: int = 2, tied: bool = False) -> Any:
    """A random model. Heads are 32 wide, as vLLM's CPU attention has nothing smaller."""
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
    }
    torch.manual_seed(seed)
    if family == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape)).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()


def save(model: Any, folder: Path) -> str:
    """A checkpoint that a vLLM server can load, with a tokenizer of words "w0", "w1", ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return str(folder)


def greedy(model: Any, prompt: Sequence[int], num_tokens: int = 16) -> list[int]:
    """What transformers generates."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def sampling(num_tokens: int = 16) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}


class WatchedActor(VLLMRolloutActor):
    """Tells how far its running requests are, so that a test can act in the middle of one."""

    num_seen = 0

    async def stream(self, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any] | None = None) -> Any:
        self.num_seen = 0
        async for output in super().stream(prompt_token_ids, sampling):
            self.num_seen = len(output["token_ids"])
            yield output

    async def seen(self) -> int:
        return self.num_seen

    async def raw(self, method: str, *args: Any) -> Any:
        """Any of vLLM's own control calls."""
        return await getattr(self._llm, method)(*args)


def start_actor(path: str, env: Mapping[str, str] | None = None, **engine_args: Any) -> Any:
    import ray

    options = {"num_cpus": 0, "runtime_env": {"env_vars": {**ENGINE_ENV, **(env or {})}}}
    return ray.remote(WatchedActor).options(**options).remote(path, **{**ENGINE_ARGS, **engine_args})


class Server:
    """A vLLM server process in development mode."""

    def __init__(self, path: str, log: Path, *, dtype: str = "float32") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = path
        self.log = log
        options = ["--enforce-eager", f"--max-model-len={MAX_LENGTH}", "--max-num-seqs=8", f"--dtype={dtype}"]
        transfer = ["--weight-transfer-config", '{"backend": "async_wsync"}']
        where = ["--model", path, "--host", "127.0.0.1", "--port", str(self.port)]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *where, *options, *transfer],
                env={**os.environ, **ENGINE_ENV, "VLLM_SERVER_DEV_MODE": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        until = time.monotonic() + SERVER_START_SECONDS
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{self.log.read_text()[-4000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"the server did not come up:\n{self.log.read_text()[-4000:]}")

    async def generate(self, prompt: Sequence[int], num_tokens: int = 16) -> list[int]:
        import httpx

        body = {"model": self.model, "prompt": list(prompt), "return_token_ids": True, **sampling(num_tokens)}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            answer = await client.post(f"{self.url}/v1/completions", json=body)
        answer.raise_for_status()
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    def stop(self) -> None:
        """End the server and all of its processes, which are a session of their own."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
