"""LoRA adapters for a running SGLang server, straight from the trainer's memory.

SGLang takes an adapter's tensors within the call itself, pickled, once for each rank. Adapters are small; no group, no
bracket and no pause are needed, and requests name the adapter that they want.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from async_wsync.engines.http import JsonServer
from async_wsync.runtime.threads import DaemonWorker
from async_wsync.types import Call

__all__ = ["LoRALoader", "load_body"]


class LoRALoader:
    """The LoRA calls of an SGLang server started with ``--enable-lora``."""

    _server: JsonServer
    _files: DaemonWorker
    _num_ranks: int

    async def load_lora(
        self,
        call: Call,
        adapter: str,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        *,
        pinned: bool = False,
        replace: bool = True,
    ) -> None:
        """Load ``adapter`` under that name. ``tensors`` and ``config`` are PEFT's: ``adapter_model`` names, and the
        content of ``adapter_config.json``. ``replace``: unload an adapter that has the name already, since SGLang
        refuses a second one. Raises `EngineFailed`.
        """
        if not tensors:
            raise ValueError("a LoRA adapter without tensors")
        packed = await self._files.run(_pickled, dict(tensors))
        if replace:
            await self.unload_lora(call, adapter)
        body = load_body(adapter, packed, config, num_ranks=self._num_ranks, pinned=pinned)
        await self._server.must("POST", "/load_lora_adapter_from_tensors", body, timeout=call.timeout, phase="lora")

    async def unload_lora(self, call: Call, adapter: str) -> bool:
        """Whether there was such an adapter."""
        path = "/unload_lora_adapter"
        answer = await self._server.ask("POST", path, {"lora_name": adapter}, timeout=call.timeout, phase="lora")
        if answer.failure is None:
            return True
        if any(words in answer.failure for words in ("does not exist", "not loaded", "not found")):
            return False
        raise self._server.failed(path, answer.failure, answer.status, phase="lora")


def load_body(adapter: str, packed: str, config: Mapping[str, Any], *, num_ranks: int, pinned: bool) -> dict[str, Any]:
    """``packed``: the tensors, pickled, in base64."""
    return {
        "lora_name": adapter,
        "config_dict": dict(config),
        "serialized_named_tensors": [packed] * num_ranks,
        "pinned": pinned,
    }


def _pickled(tensors: dict[str, torch.Tensor]) -> str:
    # Plain pickle: the sharing kind that torch's multiprocessing makes is of no use on another machine.
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return base64.b64encode(pickle.dumps(whole)).decode()
