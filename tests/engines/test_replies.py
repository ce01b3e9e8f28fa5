"""Every shape in which an engine says that it failed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from async_wsync.engines.failure import Failure
from async_wsync.engines.replies import failure_in, looks_collective, says_vllm_is_dead, short
from async_wsync.errors import BroadcastFailed, EngineFailed, EngineRejected


@dataclass
class Output:
    success: Any
    message: str = ""


@dataclass
class Response:
    status_code: int
    text: str = ""


@pytest.mark.parametrize(
    "reply",
    [
        True,
        (True, "Succeeded"),
        [True, "Succeeded", 0],
        {"success": True, "message": "Succeeded"},
        {"success": [True, True]},
        Output(True, "fine"),
        Response(200),
        [Output(True), Output(True)],
        [{"success": True}, (True, "ok")],
        [True, True],
        "Success",
        {"status": "ok"},
        {},
    ],
    ids=repr,
)
def test_a_success_is_a_success(reply: object) -> None:
    assert failure_in(reply) is None


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        (False, "False"),
        ((False, "no such group"), "no such group"),
        ([False, "no such group"], "no such group"),
        ({"success": False, "message": "shape mismatch"}, "shape mismatch"),
        ({"success": False}, "success: False"),
        ({"success": None}, "success: None"),
        ({"success": [True, False], "message": "rank 1"}, "rank 1"),
        ({"success": []}, "success: []"),
        ({"error": "out of memory"}, "out of memory"),
        ({"status": "error", "message": "bad dtype"}, "bad dtype"),
        ({"status_code": 400, "message": "begin first"}, "begin first"),
        (Output(False, "partially updated"), "partially updated"),
        (Response(400, "does not exist"), "400: does not exist"),
        (Response(503), "503"),
        ([Output(True), Output(False, "rank 1 is lost")], "rank 1 is lost"),
        ([True, False], "False"),
        ([{"success": True}, {"success": False, "message": "tp 1"}], "tp 1"),
        (RuntimeError("returned, not raised"), "returned, not raised"),
        (None, "None"),
        ([None, None], "None"),
    ],
    ids=repr,
)
def test_a_failure_is_seen_in_any_shape_and_keeps_its_words(reply: object, word: str) -> None:
    failure = failure_in(reply)
    assert failure is not None
    assert word in failure


def test_none_is_fine_where_a_method_returns_nothing_by_design() -> None:
    assert failure_in(None, none_is_failure=False) is None
    assert failure_in([None, None], none_is_failure=False) is None
    assert failure_in([None, False], none_is_failure=False) is not None


def test_long_words_are_cut() -> None:
    assert len(short("x" * 10_000)) == 300
    assert short("a\n  b") == "a b"


# ------------------------------------------------------------------------ whose failure it is

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.1]:101: Connection reset by peer"


def _raised_from(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "failure",
    [
        dist.DistBackendError("NCCL error in: /pytorch/NCCLUtils.cpp:94, unhandled system error"),
        dist.DistNetworkError("failed to recv, got 0 bytes"),
        BroadcastFailed("the broadcast broke"),
        EngineFailed("the broadcast broke: ...", is_collective=True),
        RuntimeError(GLOO),
        _raised_from(ValueError("cannot load the bucket"), RuntimeError(GLOO)),
        Exception(f"Call to update_weights method failed: {GLOO}"),
        GLOO,
        f"HTTP 400: {GLOO}",
        f"it answered success: False: Failed to update parameter online: {GLOO}",
        f"RuntimeError: {GLOO}",
        "torch.distributed.DistBackendError: NCCL error in: ...",
    ],
    ids=lambda value: short(repr(value), 40),
)
def test_a_broken_broadcast_is_known_by_its_type_or_by_how_its_message_starts(failure: BaseException | str) -> None:
    assert looks_collective(failure)


@pytest.mark.parametrize(
    "failure",
    [
        Exception("Call to collective_rpc method failed: 'Worker' object has no attribute 'update_weight'"),
        RuntimeError("collective_rpc timed out waiting for the engine core"),
        "HTTP 500: Call to collective_rpc method failed: KeyError('lm_head')",
        KeyError("nccl_weights"),
        ValueError(GLOO),
        EngineFailed("gloo: is_collective is what counts"),
        ConnectionResetError(104, "Connection reset by peer"),
        "RuntimeError: no module named gloo_collective",
        BrokenPipeError(32, "Broken pipe"),
        "the tensor 'distributed.collective.weight' is unknown",
    ],
    ids=lambda value: short(repr(value), 40),
)
def test_words_alone_make_no_failure_a_broken_broadcast(failure: BaseException | str) -> None:
    assert not looks_collective(failure)


async def test_what_gloo_itself_raises_is_known() -> None:
    """In a group of two whose second member never comes to the broadcast."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(dist.ProcessGroupGloo, store, rank, 2, timedelta(seconds=0.5)) for rank in range(2)]
        here, _ = (future.result(10) for future in made)
    with pytest.raises(RuntimeError) as late:
        here.broadcast([torch.zeros(4)], dist.BroadcastOptions()).wait()
        here.recv([torch.zeros(4)], 1, 0).wait()
    assert looks_collective(late.value)
    assert looks_collective(f"HTTP 400: {late.value}")


def test_vllm_collective_rpc_failures_are_the_engines_own() -> None:
    own = Failure.of(Exception("Call to collective_rpc method failed: KeyError: 'lm_head'"))
    assert not own.is_collective
    assert Failure.of(RuntimeError(GLOO)).is_collective
    assert Failure.of(EngineFailed("broken off before its turn", is_collective=True)).is_collective
    assert not Failure.of(EngineRejected("unknown here: gloo")).is_collective


def test_a_dead_vllm_is_told_from_one_that_speaks_of_death() -> None:
    for dead in (
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
        "Traceback (most recent call last):\n  ...\nEngineDeadError",
        "{'error': {'message': 'EngineCore encountered an issue. See stack trace (above)', 'code': 500}}",
        "RuntimeError: Executor failed.",
        "RuntimeError: vLLM's engine is dead: its process 7 has ended",
    ):
        assert says_vllm_is_dead(dead), dead
    for alive in (
        "HTTP 404: no route for EngineDeadError",
        "KeyError: 'an engine is dead'",
        "ValueError: is Executor failed. a name?",
    ):
        assert not says_vllm_is_dead(alive), alive
