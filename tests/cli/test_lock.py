"""``async-wsync lock`` against a running cluster, as another terminal would run it."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import uuid
from typing import Any

import pytest

from async_wsync.cli.lock import table
from async_wsync.errors import LeaseLost
from async_wsync.lock import BroadcastLock
from tests.support.cluster import ROOT


async def command(ray_cluster: Any, *arguments: str) -> tuple[int, str, str]:
    words = [sys.executable, "-m", "async_wsync", "lock", *arguments, "--address", ray_cluster.address]
    run = functools.partial(
        subprocess.run, words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    done = await asyncio.get_running_loop().run_in_executor(None, run)
    return done.returncode, done.stdout, done.stderr


async def test_a_terminal_shows_and_breaks_a_held_lock(ray_cluster: Any) -> None:
    name = f"cli-{uuid.uuid4().hex[:8]}"
    lock = BroadcastLock.create(name=name, ttl=6.0)
    with pytest.raises(LeaseLost, match="revoked by hand"):
        async with lock.hold(label="trainer") as held:
            held.set_stage("bucket 3/12")
            await asyncio.sleep(0.3)
            code, out, _ = await command(ray_cluster, "status", name)
            assert code == 0
            for word in ("trainer", "bucket 3/12", str(os.getpid()), held.claim, "lease left"):
                assert word in out, out
            code, out, _ = await command(ray_cluster, "status", name, "--json", "--check")
            assert code == 3
            assert json.loads(out)["holder"]["fence"] == held.fence
            code, _, err = await command(ray_cluster, "break", name, "--claim", "somebody")
            assert code == 3, err
            code, out, _ = await command(ray_cluster, "break", name, "--claim", held.claim[:8])
            assert code == 0
            assert "revoked: trainer" in out
            await asyncio.sleep(30)
    assert not (await lock.status())["held"]


async def test_an_unknown_lock_has_its_own_exit_code(ray_cluster: Any) -> None:
    code, _, err = await command(ray_cluster, "status", "no-such-lock")
    assert code == 4
    assert "no lock 'no-such-lock'" in err


def test_the_table_of_a_free_lock_is_short() -> None:
    status = {
        "name": "w",
        "ttl": 30.0,
        "num_grants": 0,
        "quarantine_left": 1.5,
        "held": False,
        "holder": None,
        "waiters": [],
        "transitions": [],
    }
    assert table(status).splitlines() == [
        "lock w   lease 30 s   grants 0",
        "  the server has restarted, and grants nothing for another 1.5 s",
        "  free",
        "waiting: nobody",
    ]
