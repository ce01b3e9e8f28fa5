"""`SGLangServer`: an SGLang server over HTTP."""

from __future__ import annotations

import base64
import os
import pickle
import ssl
from collections.abc import Mapping
from typing import Any

import torch

from async_wsync import arguments
from async_wsync.engines.sglang import messages as wire
from async_wsync.engines.sglang.engine import SGLangEngine
from async_wsync.engines.sglang.http_transport import HttpTransport
from async_wsync.engines.sglang.messages import Selector
from async_wsync.types import Call, WireFormat

__all__ = ["SGLangServer"]


class SGLangServer(SGLangEngine):
    """One SGLang server, as a `RolloutEngine`. Needs httpx (extra ``http``).

    Args:
        url: the server's, with ``http://`` or ``https://``.
        num_ranks: its tensor parallel size; `discover` asks the server for it.
        name: for messages, unique among a broadcaster's engines. The URL, if not given.
        api_key: the server's.
        verify: as httpx takes it, for example an ``ssl.SSLContext`` with your own CA.
        wire_format: FLATTENED (one buffer a bucket, SGLang's ``flattened_bucket``), or PER_TENSOR for servers too old
            for it.
        selector: which of its models take the weights, if it has a draft model.
        checkpoint: a directory as the server was started from, to check names and shapes by, if the server's own
            can't be read from here.
        check_names: False leaves that check out, for models whose names at the server differ from their checkpoint's.

    Raises ValueError for an argument that is no use.
    """

    def __init__(
        self,
        url: str,
        *,
        num_ranks: int = 1,
        name: str | None = None,
        api_key: str | None = None,
        verify: ssl.SSLContext | bool = True,
        wire_format: WireFormat = WireFormat.FLATTENED,
        selector: Selector = "all",
        checkpoint: str | os.PathLike[str] | None = None,
        check_names: bool = True,
    ) -> None:
        arguments.url("the URL of an SGLang server", url)
        arguments.text("name", name, none=True)
        url = url.rstrip("/")
        super().__init__(
            HttpTransport(url, name=name or url, api_key=api_key, verify=verify),
            num_ranks=num_ranks,
            wire_format=wire_format,
            selector=selector,
            checkpoint=checkpoint,
            check_names=check_names,
        )

    @classmethod
    async def discover(cls, url: str, *, timeout: float = 30.0, **options: Any) -> SGLangServer:
        """The server at ``url``, asked for its number of ranks within ``timeout`` seconds. ``options``: the class's."""
        engine = cls(url, **options)
        done = False
        try:
            process = await engine._transport.process(Call(source="", fence=0, timeout=timeout))
            engine.num_ranks = int(process.facts.get("tp_size") or 1)
            done = True
        finally:
            if not done:
                await engine.aclose()
        return engine

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
        """Load a LoRA adapter from memory into a server that was started with ``--enable-lora``.

        SGLang takes the tensors within the call itself, pickled, once for each rank. That needs no group and no pause;
        requests name the adapter that they want.

        Args:
            call: ``call.timeout`` bounds each request, in seconds.
            adapter: the name to load it under.
            tensors: PEFT's ``adapter_model``, by name.
            config: the content of PEFT's ``adapter_config.json``.
            pinned: SGLang keeps the adapter on the GPU.
            replace: unload an adapter that has the name already: SGLang refuses a second one.

        Raises `EngineFailed`, and ValueError if there are no tensors.
        """
        if not tensors:
            raise ValueError("a LoRA adapter without tensors")
        packed = await self._files.run(_pickled, dict(tensors))
        if replace:
            await self.unload_lora(call, adapter)
        body = wire.load_lora(adapter, packed, config, num_ranks=self.num_ranks, pinned=pinned)
        (await self._ask("load_lora_adapter_from_tensors", body, call, phase="lora")).raise_failure()

    async def unload_lora(self, call: Call, adapter: str) -> bool:
        """Whether there was such an adapter. Raises `EngineFailed`."""
        answer = await self._ask("unload_lora_adapter", wire.unload_lora(adapter), call, phase="lora")
        if answer.says("does not exist", "not loaded", "not found"):
            return False
        answer.raise_failure()
        return True


def _pickled(tensors: dict[str, torch.Tensor]) -> str:
    """In base64. Plain pickle: handles to shared memory, as torch's multiprocessing makes, mean nothing elsewhere."""
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return base64.b64encode(pickle.dumps(whole)).decode()
