"""The weight transfer backend ``async_wsync``, as it runs inside each worker of vLLM. Imported by vLLM only.

vLLM's own cycle is kept: init_weight_transfer_engine joins a group, start_weight_update opens the layerwise reload,
update_weights takes a bucket, finish_weight_update closes. All of them return at once and raise nothing; how it went is
asked for by calling the worker's attribute ``weight_transfer_engine`` through vLLM's collective_rpc, which gives the
answer of every rank. See `VLLMReceiver` for why.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from async_wsync.engines.rejection import Findings
from async_wsync.engines.vllm.messages import UNSEEN_REPLICA
from async_wsync.engines.vllm.names import drop_half_loaded, inspect_manifest
from async_wsync.engines.vllm.receiver import VLLMReceiver
from async_wsync.types import Manifest

__all__ = ["InitInfo", "UpdateInfo", "WeightSyncEngine"]

_UNSEEN_WAIT = 1.0


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """``request``: a ``join`` as text."""

    request: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``request``: a ``receive`` as text."""

    request: str


class LayerwiseLoader:
    """Loads through vLLM's layerwise reload: a layer is replaced once all of it has arrived."""

    def __init__(self, engine: WeightSyncEngine) -> None:
        self._engine = engine
        self.device: torch.device = engine.device

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self._engine.model
        return model

    def inspect(self, manifest: Manifest) -> Findings:
        tp_size = self._engine.parallel_config.tensor_parallel_size
        return inspect_manifest(self._model, self._engine.model_config, manifest, tp_size=tp_size)

    def open(self) -> None:
        initialize_layerwise_reload(self._model)

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        with _buckets_are_parts():
            self._model.load_weights(iter(tensors))  # type: ignore[operator]

    def close(self, *, keep: bool) -> None:
        if keep:
            finalize_layerwise_reload(self._model, self._engine.model_config)
        else:
            drop_half_loaded(self._model, self._engine.model_config, finalize_layerwise_reload, get_layerwise_info)


def _buckets_are_parts() -> AbstractContextManager[None]:
    """Some models check after each load_weights that all of a draft head came; a bucket is never all."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return nullcontext()
    checks: AbstractContextManager[None] = disable_mtp_completeness_check()
    return checks


class WeightSyncEngine(WeightTransferEngine):  # type: ignore[misc]
    """One worker's. Calling it answers a request; that is how vLLM's collective_rpc reaches it by name."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        self._replica: int = parallel.data_parallel_index
        self._receiver = VLLMReceiver(
            LayerwiseLoader(self),
            rank=self._replica * parallel.world_size + parallel.rank,
            num_ranks=parallel.world_size_across_dp,
        )

    def __call__(self, request: str) -> dict[str, Any]:
        with set_current_vllm_config(self.vllm_config):
            if self._replica:
                return self._answer_unseen(request)
            return self._receiver.handle(request)

    def _answer_unseen(self, request: str) -> dict[str, Any]:
        """vLLM drops the answers of all data parallel replicas but the first; only an exception comes through.

        The last worker raises it, for all: by then vLLM has taken the other workers' answers from their queues.
        """
        polls = json.loads(request)["verb"] == "poll"
        if polls:
            request = json.dumps(json.loads(request) | {"wait": _UNSEEN_WAIT})
        replies = self._replica_answers(self._receiver.handle(request))
        failed = [r for r in replies if r["failure"] is not None]
        told = failed or [r for r in replies if polls and not r["done"]]
        if told and self.parallel_config.rank == self.parallel_config.world_size - 1:
            raise RuntimeError(UNSEEN_REPLICA + json.dumps(told[0]))
        return replies[-1]

    def _replica_answers(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        """The answers of all tensor parallel workers of this replica, which were all asked the same."""
        if self.parallel_config.tensor_parallel_size == 1:
            return [reply]
        group = get_tp_group().cpu_group
        replies: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(replies, reply, group=group)
        return replies

    # vLLM's own cycle. ``collective_rpc`` of several workers does not survive an exception, so none is raised.

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._receiver.handle(init_info.request)

    def start_weight_update(self) -> None:
        self._receiver.started()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._receiver.handle(update_info.request)

    def finish_weight_update(self) -> None:
        self._receiver.finished()

    def shutdown(self) -> None:
        self._receiver.close()
