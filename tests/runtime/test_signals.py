"""A trainer is told to end while it forms a group with one frozen engine: by SIGTERM, and by Ctrl-C."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray import cloudpickle

from async_wsync.testing import Fault
from tests.support.cluster import ROOT, RayCluster
from tests.support.fleet import Rig
from tests.support.freezes import is_frozen
from tests.support.waiting import until

CLOSE = 4.0

SCRIPT = f"""
import asyncio, base64, sys, time
import ray
from async_wsync import Timeouts, TorchEngine, WeightBroadcaster
from tests.support.fleet import a_source

async def main(how, handles):
    engines = [TorchEngine(handle, name=name) for name, handle in handles.items()]
    limits = Timeouts(connect=60, drain=30, close={CLOSE})
    broadcaster = WeightBroadcaster(engines, lock=None, backend="gloo", timeouts=limits, progress=False)
    await (broadcaster.connect() if how == "connect" else broadcaster.update_weights(a_source(1), version=1))

ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False, configure_logging=False)
try:
    asyncio.run(main(sys.argv[3], ray.cloudpickle.loads(base64.b64decode(sys.argv[4]))))
finally:
    print("over at", time.time(), flush=True)
    ray.shutdown()
"""


@pytest.mark.parametrize("how", ["update", "connect"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_trainer_that_is_told_to_end_while_it_forms_a_group_does_so_quietly(
    rig: Rig, ray_cluster: RayCluster, tmp_path: Path, number: signal.Signals, how: str
) -> None:
    await rig.script("e1", Fault(do="stop", at="join"))
    script = tmp_path / "trainer.py"
    script.write_text(SCRIPT)
    handles = base64.b64encode(cloudpickle.dumps(rig.handles)).decode()
    trainer = subprocess.Popen(
        [sys.executable, str(script), ray_cluster.address, ray_cluster.namespace, how, handles],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        await until(lambda: is_frozen(rig.pids["e1"]))
        told_at = time.time()
        trainer.send_signal(number)
        out, err = trainer.communicate(timeout=60)
    finally:
        trainer.kill()
        rig.kill("e1", signal.SIGCONT)
    (over,) = re.findall(r"over at ([\d.]+)", out)
    assert float(over) - told_at < CLOSE, err
    # Ray's own handler of SIGTERM ends the process with the number of the signal, Python's of SIGINT by the signal.
    assert trainer.returncode == (15 if number == signal.SIGTERM else -signal.SIGINT), err
    for complaint in ("SIGTERM received", "frame #", "terminate called", "Fatal Python error", "never retrieved"):
        assert complaint not in err, err
