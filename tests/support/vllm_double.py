"""The engine that `VLLMEngine` talks to, without vLLM: our real receivers, a model that is a dict, vLLM's own rules."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from async_wsync.engines.rejection import Findings
from async_wsync.engines.vllm.control import At
from async_wsync.engines.vllm.receiver import VLLMReceiver
from async_wsync.runtime.object_refs import RemoteDied, RemoteRaised
from async_wsync.transfer.tensors import dtype_name
from async_wsync.types import Manifest


class DictLoader:
    """Loads into named tensors. ``bad_name``: fails on it."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.device = torch.device("cpu")
        self.tensors = tensors
        self.bad_name: str | None = None
        self.opened = False
        self.kept: list[bool] = []

    def inspect(self, manifest: Manifest) -> Findings:
        assert not self.opened, "a trial load needs a model that is whole"
        metas = {meta.name: meta for meta in manifest.params}
        return Findings(
            unused=tuple(name for name in metas if name not in self.tensors),
            missing=tuple(name for name in self.tensors if name not in metas),
            mismatched=tuple(
                name
                for name, meta in metas.items()
                if (t := self.tensors.get(name)) is not None
                and (tuple(t.shape), dtype_name(t.dtype)) != (meta.shape, meta.dtype)
            ),
        )

    def open(self) -> None:
        assert not self.opened
        self.opened = True

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        assert self.opened
        for name, tensor in tensors:
            if name == self.bad_name:
                raise RuntimeError(f"cannot load {name}")
            self.tensors[name].copy_(tensor)

    def close(self, *, keep: bool) -> None:
        assert self.opened
        self.opened = False
        self.kept.append(keep)


class Engine:
    """As many ranks as it is given models; satisfies `Control`. Refuses a second start, as vLLM does."""

    def __init__(self, *models: dict[str, torch.Tensor]) -> None:
        self.loaders = [DictLoader(model) for model in models]
        self.receivers = [
            VLLMReceiver(loader, rank=rank, num_ranks=len(models)) for rank, loader in enumerate(self.loaders)
        ]
        self.paused: str | None = None
        self.version = "default"
        self.active = False
        self.dead = False
        self.hang = asyncio.Event()
        self.hang.set()

    async def _answer(self) -> None:
        await self.hang.wait()
        if self.dead:
            raise RemoteDied("gone")

    async def health(self, at: At) -> None:
        if self.dead:
            raise RemoteDied("gone")

    async def ask(self, request: str, at: At) -> list[dict[str, Any]]:
        await self._answer()
        return [receiver.handle(request) for receiver in self.receivers]

    async def num_ranks(self, at: At) -> int:
        await self._answer()
        return len(self.receivers)

    async def pause(self, mode: str, clear_cache: bool, at: At) -> None:
        self.paused = mode

    async def resume(self, at: At) -> None:
        self.paused = None

    async def is_paused(self, at: At) -> bool:
        return self.paused is not None

    async def reset_cache(self, running: bool, at: At) -> bool:
        return True

    async def init(self, request: str, at: At) -> None:
        for receiver in self.receivers:
            receiver.handle(request)

    async def start(self, at: At) -> None:
        if self.active:
            raise RemoteRaised("start_weight_update called while a weight update is already active")
        self.active = True
        for receiver in self.receivers:
            receiver.started()

    async def update(self, request: str, at: At) -> None:
        assert self.active
        for receiver in self.receivers:
            receiver.handle(request)

    async def finish(self, at: At) -> None:
        if not self.active:
            raise RemoteRaised("finish_weight_update called without a matching start_weight_update")
        self.active = False
        for receiver in self.receivers:
            receiver.finished()

    async def set_version(self, version: str, at: At) -> None:
        self.version = version

    async def get_version(self, at: At) -> str:
        await self._answer()
        return self.version

    async def aclose(self) -> None:
        pass

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
