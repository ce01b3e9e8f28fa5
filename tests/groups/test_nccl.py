"""What of NCCL's part in an update group needs no GPU."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from async_wsync.engines.receiving.group_membership import GroupMembership
from async_wsync.groups.nccl import errors_left_to_us, wire_device
from async_wsync.groups.rendezvous import Rendezvous, join_group
from async_wsync.runtime.cuda_streams import SideStream, queued_by_now
from async_wsync.types import GroupSpec

MODE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
CPU = torch.device("cpu")

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize(
    ("asked", "got"), [(None, "2"), ("1", "2"), ("3", "2"), ("", "2"), ("0", "0"), ("2", "2")], ids=str
)
def test_torch_reads_that_our_groups_must_not_end_the_process_and_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, got: str
) -> None:
    if asked is None:
        monkeypatch.delenv(MODE, raising=False)
    else:
        monkeypatch.setenv(MODE, asked)
    with errors_left_to_us():
        assert os.environ[MODE] == got
    assert os.environ.get(MODE) == asked


def test_the_environment_is_as_before_when_no_group_could_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE, "1")
    with pytest.raises(ZeroDivisionError), errors_left_to_us():
        _ = 1 // 0
    assert os.environ[MODE] == "1"


def test_groups_made_at_once_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE, "1")
    seen: set[str | None] = set()

    def make() -> None:
        for _ in range(200):
            with errors_left_to_us():
                seen.add(os.environ.get(MODE))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"2"}
    assert os.environ[MODE] == "1"


def test_gloos_tensors_lie_on_the_cpu_wherever_the_sources_are() -> None:
    assert wire_device("gloo", torch.device("cuda", 1)) == CPU
    assert wire_device("gloo") == CPU


@without_cuda
async def test_nccl_is_refused_at_once_where_there_is_no_cuda() -> None:
    with pytest.raises(ValueError, match=r"this process has (a torch without NCCL|no CUDA device)"):
        await Rendezvous.open(
            address="127.0.0.1", backend="nccl", name="g", epoch=1, world_size=2, timeout=5.0, connect_timeout=5.0
        )
    spec = GroupSpec(
        name="g",
        backend="nccl",
        master_address="127.0.0.1",
        master_port=1,
        world_size=2,
        epoch=1,
        timeout=5.0,
        connect_timeout=5.0,
    )
    with pytest.raises(ValueError, match="'nccl' cannot be used here"):
        join_group(spec, 1, member="e")
    with pytest.raises(ValueError, match="'nccl' cannot be used here"):
        GroupMembership(spec, 1, source="trainer", fence=1, member="e")


def test_a_side_stream_of_the_cpu_is_none() -> None:
    side = SideStream(CPU)
    with side.current(after=queued_by_now(CPU)):
        side.keep(torch.zeros(1))
    assert side.mark() is None
    side.synchronize()
