"""What we send against vLLM's own request classes, routes and methods: a renamed field fails here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import typing
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


def _parameters(fn: Any) -> set[str]:
    return set(inspect.signature(fn).parameters)


def test_the_entry_point_registers_the_backend() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    (ours,) = [point for point in points if point.name == "async_wsync"]
    register = ours.load()
    register()
    register()
    assert WeightTransferEngineFactory._registry["async_wsync"]().__name__ == "WeightSyncEngine"


def test_the_request_classes_have_the_fields_that_we_fill() -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    for cls, field in ((WeightTransferInitRequest, "init_info"), (WeightTransferUpdateRequest, "update_info")):
        assert [f.name for f in dataclasses.fields(cls)] == [field]
        assert cls(**{field: {"request": "{}"}})


def test_the_backend_has_all_that_vllm_asks_of_one() -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    from async_wsync.engines.vllm.worker import InitInfo, UpdateInfo, WeightSyncEngine

    assert not inspect.isabstract(WeightSyncEngine)
    abstract = {
        name for name, member in vars(WeightTransferEngine).items() if getattr(member, "__isabstractmethod__", 0)
    }
    assert abstract <= set(vars(WeightSyncEngine))
    for cls in (InitInfo, UpdateInfo):
        assert [f.name for f in dataclasses.fields(cls)] == ["request"]
    assert _parameters(WeightTransferEngine.__init__) == _parameters(WeightSyncEngine.__init__)


def test_a_worker_keeps_the_backend_where_we_call_it() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from async_wsync.engines.vllm.control import _ATTRIBUTE

    assert f"self.{_ATTRIBUTE}" in inspect.getsource(Worker.__init__)
    assert {"init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"} <= set(
        dir(Worker)
    )


def test_the_http_routes_take_what_we_send() -> None:
    from vllm.entrypoints.rl.online import api_router as rl
    from vllm.entrypoints.serve.dev.cache import api_router as cache
    from vllm.entrypoints.serve.dev.rpc import api_router as rpc

    fields = {
        rl.pause_generation: {"mode", "clear_cache"},
        rl.init_weight_transfer_engine: {"init_info"},
        rl.update_weights: {"update_info"},
        rl.update_weight_version: {"new_version"},
        cache.reset_prefix_cache: {"reset_running_requests"},
    }
    for route, names in fields.items():
        assert names <= _parameters(route), route
    paths = {route.path: route.methods for router in (rl.router, cache.router, rpc.router) for route in router.routes}
    posts = "/pause /resume /init_weight_transfer_engine /start_weight_update /update_weights /finish_weight_update"
    for path in [*posts.split(), "/update_weight_version", "/reset_prefix_cache", "/collective_rpc"]:
        assert "POST" in paths[path]
    for path in ("/is_paused", "/weight_info", "/get_world_size"):
        assert "GET" in paths[path]


def test_the_methods_of_asyncllm_take_what_we_send() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    methods = {
        "pause_generation": {"mode", "clear_cache"},
        "resume_generation": set(),
        "is_paused": set(),
        "reset_prefix_cache": {"reset_running_requests"},
        "init_weight_transfer_engine": {"request"},
        "start_weight_update": set(),
        "update_weights": {"request"},
        "finish_weight_update": set(),
        "update_weight_version": {"new_version"},
        "get_weight_version": set(),
        "collective_rpc": {"method", "args"},
        "check_health": set(),
    }
    for name, names in methods.items():
        assert names <= _parameters(getattr(AsyncLLM, name)), name


def test_each_pause_mode_is_one_of_vllms() -> None:
    from vllm.v1.engine import PauseMode as VLLMPauseMode

    from async_wsync.engines.vllm.engine import _PAUSES
    from async_wsync.types import PauseMode

    assert set(_PAUSES) == set(PauseMode)
    assert {words for words, _ in _PAUSES.values()} <= set(typing.get_args(VLLMPauseMode))


def test_the_layerwise_reload_is_there() -> None:
    from vllm.model_executor.model_loader.reload import layerwise, meta
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

    assert callable(layerwise.initialize_layerwise_reload)
    assert callable(layerwise.finalize_layerwise_reload)
    assert callable(meta.get_numel_loaded)
    fields = {f.name for f in dataclasses.fields(LayerReloadingInfo)}
    assert {"load_numel", "loaded_weights", "kernel_tensors"} <= fields
