"""What a weight update costs, beside the bare broadcast and beside the way it is done today.

In one run, with two engines as Ray actors over gloo, and taking turns so that a noisy machine hits all alike:

  a  raw      one dist.broadcast of one buffer of the same bytes, into warm memory
  b  blocking one dist.broadcast a tensor (async_op), wait for each, ray.get: what frameworks do today
  c  update   WeightBroadcaster.update_weights: pause, check, begin, buckets, end, publish and resume included

    python benchmarks/broadcast.py --json result.json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import socket
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from async_wsync import StateDictSource, TorchEngine, WeightBroadcaster, WeightReceiver
from async_wsync.runtime.loop_gap import LoopGapMeter
from async_wsync.transfer.checksum import combined_digest, model_digests

ENGINES = 2
GROUP_TIMEOUT = timedelta(seconds=120)
METHODS = {"a": "raw", "b": "blocking", "c": "update"}


@dataclass(frozen=True)
class Shape:
    """A model of ``num_tensors`` square-ish bfloat16 tensors."""

    name: str
    num_tensors: int
    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        return self.num_tensors * self.rows * self.columns * 2

    def build(self, *, random: bool) -> dict[str, torch.Tensor]:
        make = torch.randn if random else torch.zeros
        one = (self.rows, self.columns)
        return {f"layers.{i}.weight": make(one, dtype=torch.bfloat16) for i in range(self.num_tensors)}


SHAPES = {
    "dense": Shape("dense", 200, 640, 1024),
    "experts": Shape("experts", 8000, 64, 64),
}


# -------------------------------------------------------------------------------- memory


def rss() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """The most that this process held above what it holds at `start`, sampled every millisecond."""

    def start(self) -> None:
        gc.collect()
        self._base = self._peak = rss()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self._peak - self._base

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self._peak = max(self._peak, rss())


# -------------------------------------------------------------------------------- engines


@ray.remote
class Engine(WeightReceiver):
    """An engine that can receive in all three ways."""

    def __init__(self, shape: Shape) -> None:
        self.model = shape.build(random=False)
        self.raw = torch.zeros(shape.nbytes, dtype=torch.uint8)
        self.memory = PeakMemory()
        self.init_weight_receiver(self.model)
        gc.freeze()

    def join_raw(self, address: str, rank: int) -> None:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ENGINES + 1, timeout=GROUP_TIMEOUT)

    def receive_raw(self) -> None:
        dist.barrier()
        dist.broadcast(self.raw, 0)
        dist.barrier()

    def update_weights_from_distributed(self, names: list[str], dtypes: list[str], shapes: list[Any]) -> bool:
        received, works = [], []
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            works.append(dist.broadcast(tensor, 0, async_op=True))
            received.append((name, tensor))
        for work in works:
            work.wait()
        for name, tensor in received:
            self.model[name].copy_(tensor)
        return True

    def watch_memory(self) -> None:
        self.memory.start()

    def peak_memory(self) -> int:
        return self.memory.stop()

    def checksum(self) -> str:
        return combined_digest(model_digests(self.model))


# -------------------------------------------------------------------------------- the three ways


@dataclass
class Sample:
    """One update. Times in seconds, sizes in bytes. What it took and its memory are samples of their own: who looks
    at the memory every millisecond takes its share of the time."""

    seconds: float
    loop_gap: float
    source_memory: int = 0
    engine_memory: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)


class Bench:
    def __init__(self, shape: Shape, bucket_bytes: int) -> None:
        self.shape = shape
        self.bucket_bytes = bucket_bytes
        self.model = shape.build(random=True)
        self.raw = torch.ones(shape.nbytes, dtype=torch.uint8)
        self.engines = [Engine.remote(shape) for _ in range(ENGINES)]
        self.version = 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        joined = [engine.join_raw.remote(address, rank + 1) for rank, engine in enumerate(self.engines)]
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=ENGINES + 1, timeout=GROUP_TIMEOUT)
        ray.get(joined)

    def close(self) -> None:
        dist.destroy_process_group()
        for engine in self.engines:
            ray.kill(engine)

    async def a(self, broadcaster: WeightBroadcaster) -> tuple[float, Mapping[str, float]]:
        refs = [engine.receive_raw.remote() for engine in self.engines]
        dist.barrier()
        started = time.perf_counter()
        dist.broadcast(self.raw, 0)
        dist.barrier()
        seconds = time.perf_counter() - started
        ray.get(refs)
        return seconds, {}

    async def b(self, broadcaster: WeightBroadcaster) -> tuple[float, Mapping[str, float]]:
        started = time.perf_counter()
        for bucket in self._buckets():
            names, tensors = list(bucket), list(bucket.values())
            dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors]
            shapes = [list(t.shape) for t in tensors]
            refs = [e.update_weights_from_distributed.remote(names, dtypes, shapes) for e in self.engines]
            works = [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()
            ray.get(refs)
        return time.perf_counter() - started, {}

    async def c(self, broadcaster: WeightBroadcaster) -> tuple[float, Mapping[str, float]]:
        self.version += 1
        started = time.perf_counter()
        report = await broadcaster.update_weights(StateDictSource(self.model), version=self.version)
        return time.perf_counter() - started, report.phases

    def _buckets(self) -> Iterator[dict[str, torch.Tensor]]:
        bucket: dict[str, torch.Tensor] = {}
        size = 0
        for name, tensor in self.model.items():
            if bucket and size + tensor.nbytes > self.bucket_bytes:
                yield bucket
                bucket, size = {}, 0
            bucket[name] = tensor
            size += tensor.nbytes
        yield bucket

    async def sample(self, way: str, broadcaster: WeightBroadcaster, *, memory: bool) -> Sample:
        run: Callable[[WeightBroadcaster], Awaitable[tuple[float, Mapping[str, float]]]] = getattr(self, way)
        for tensor in self.model.values():
            tensor.add_(1)
        mine, theirs, peak = 0, 0, PeakMemory()
        if memory:
            ray.get([engine.watch_memory.remote() for engine in self.engines])
            peak.start()
        await asyncio.sleep(0.05)
        with LoopGapMeter() as meter:
            seconds, phases = await run(broadcaster)
        if memory:
            mine = peak.stop()
            theirs = max(ray.get([engine.peak_memory.remote() for engine in self.engines]))
        if way != "a":
            checksums = ray.get([engine.checksum.remote() for engine in self.engines])
            assert set(checksums) == {combined_digest(model_digests(self.model))}, f"{way}: the weights did not arrive"
        return Sample(seconds, meter.longest, mine, theirs, phases)


async def measure(bench: Bench, *, repeats: int, ways: str, num_buffers: int) -> dict[str, list[Sample]]:
    """``repeats`` timed samples of each way, in rounds whose order rotates, after one that looks at the memory."""
    samples: dict[str, list[Sample]] = {way: [] for way in ways}
    broadcaster = WeightBroadcaster(
        [TorchEngine(engine) for engine in bench.engines],
        lock=None,
        backend="gloo",
        bucket_bytes=bench.bucket_bytes,
        num_buffers=num_buffers,
        progress=False,
    )
    async with broadcaster:
        for turn in range(repeats + 2):  # the first is cold, the second looks at the memory
            for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                samples[way].append(await bench.sample(way, broadcaster, memory=turn == 1))
    return samples


# -------------------------------------------------------------------------------- the result


def summarize(shape: Shape, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    ways = {}
    timed = {way: taken[2:] for way, taken in samples.items()}
    for way, taken in timed.items():
        seconds = statistics.median(s.seconds for s in taken)
        ways[METHODS[way]] = {
            "seconds": seconds,
            "gbps": shape.nbytes / seconds / 1e9,
            "longest_loop_gap_ms": max(s.loop_gap for s in taken) * 1e3,
            "source_extra_bytes": samples[way][1].source_memory,
            "engine_extra_bytes": samples[way][1].engine_memory,
            "samples": [asdict(s) for s in taken],
        }
    result: dict[str, Any] = {"nbytes": shape.nbytes, "num_tensors": shape.num_tensors, "ways": ways}
    for other in "ab":
        if other in timed and "c" in timed:
            # Speed of c in units of the other's, pair by pair, so that drift of the machine cancels out.
            ratios = [o.seconds / c.seconds for o, c in zip(timed[other], timed["c"], strict=True)]
            result[f"update_over_{METHODS[other]}"] = statistics.median(ratios)
    return result


def show(name: str, result: dict[str, Any]) -> None:
    print(f"\n{name}: {result['nbytes'] / 1e6:.0f} MB in {result['num_tensors']} tensors, {ENGINES} engines, gloo")
    print(f"{'':10}{'seconds':>9}{'GB/s':>8}{'loop gap':>11}{'source +':>11}{'engine +':>11}")
    for way, row in result["ways"].items():
        print(
            f"{way:10}{row['seconds']:9.3f}{row['gbps']:8.2f}{row['longest_loop_gap_ms']:8.1f} ms"
            f"{row['source_extra_bytes'] / 1e6:8.0f} MB{row['engine_extra_bytes'] / 1e6:8.0f} MB"
        )
    for key in ("update_over_raw", "update_over_blocking"):
        if key in result:
            print(f"{key.replace('_', ' ')}: {result[key]:.2f} x (median of pairs)")


@contextmanager
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=ENGINES + 1, include_dashboard=False, object_store_memory=200 * 1024 * 1024)
    try:
        yield
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything measured to PATH")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--models", default="dense,experts", help="which of dense,experts")
    parser.add_argument("--ways", default="abc", help="which of a, b, c")
    parser.add_argument("--bucket-mb", type=float, default=64, help="bucket size in MiB (default 64)")
    parser.add_argument("--num-buffers", type=int, default=2, help="buckets alive at once (default 2)")
    args = parser.parse_args()
    results = {}
    with cluster():
        for name in args.models.split(","):
            bench = Bench(SHAPES[name], int(args.bucket_mb * 1024 * 1024))
            gc.freeze()  # as docs/failure-modes.md recommends: a full collection of torch and Ray takes 0.25 s
            try:
                samples = asyncio.run(
                    measure(bench, repeats=args.repeats, ways=args.ways, num_buffers=args.num_buffers)
                )
            finally:
                bench.close()
            results[name] = summarize(SHAPES[name], samples)
            show(name, results[name])
    if args.json:
        machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "torch": torch.__version__}
        settings = {"bucket_mb": args.bucket_mb, "num_buffers": args.num_buffers, "repeats": args.repeats}
        args.json.write_text(json.dumps({"machine": machine, "settings": settings, "models": results}, indent=2))


if __name__ == "__main__":
    main()
