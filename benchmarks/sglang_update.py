"""How long a running SGLang server takes for an update, and how much of that is its own loading.

    python benchmarks/sglang_update.py URL CHECKPOINT [--wire per_tensor] [--bucket-mb 64] [--json PATH]

For each bucket two clocks run: until the broadcast is over at this end, and until the server has answered. The
difference is the server's own work: copying into its parameters, fused and sharded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from async_wsync.core.buckets import lay_out, plan_buckets, stage
from async_wsync.engines.sglang import SGLangServer
from async_wsync.runtime.object_refs import host_address
from async_wsync.runtime.update_group import Rendezvous, UpdateGroup
from async_wsync.sources import SafetensorsSource
from async_wsync.types import BucketSpec, Call, PauseMode, UpdateSpec, WireFormat

CALL = Call(source="benchmark", fence=1, timeout=600.0)


@dataclass
class Result:
    wire: str
    nbytes: int
    num_tensors: int
    num_buckets: int
    total_seconds: float
    buckets_seconds: float
    broadcast_seconds: float

    @property
    def engine_share(self) -> float:
        """Of the buckets' time, what the server spent after the last byte had left."""
        return 1 - self.broadcast_seconds / self.buckets_seconds if self.buckets_seconds else 0.0


async def main(url: str, checkpoint: Path, wire: WireFormat, bucket_bytes: int) -> Result:
    source = SafetensorsSource(checkpoint)
    manifest = source.manifest()
    tensors = dict(source.tensors())
    buckets = plan_buckets(manifest, bucket_bytes=bucket_bytes)
    engine = await SGLangServer.discover(url, wire_format=wire)
    group = await join(engine)
    spec = UpdateSpec(update_id="b", version=0, manifest=manifest, buckets=buckets, group=group.spec.name)

    async def send(bucket: BucketSpec) -> tuple[float, float]:
        wires = stage(lay_out(bucket, wire), {meta.name: tensors[meta.name] for meta in bucket.params})
        began = time.perf_counter()
        receiving = asyncio.create_task(engine.receive(CALL, spec, bucket))
        await group.broadcast(wires)
        sent = time.perf_counter() - began
        await receiving
        return sent, time.perf_counter() - began

    began = time.perf_counter()
    await engine.pause(CALL, PauseMode.ABORT)
    await engine.reset(CALL)
    await engine.flush(CALL)
    await engine.begin(CALL, spec)
    clocks = [await send(bucket) for bucket in buckets]
    await engine.end(CALL, spec)
    await engine.publish(CALL, int(time.time()))
    await engine.resume(CALL)
    total = time.perf_counter() - began
    await engine.leave(CALL, group.spec.name)
    await group.aclose()
    await engine.aclose()
    return Result(
        wire=wire.value,
        nbytes=sum(bucket.nbytes for bucket in buckets),
        num_tensors=len(manifest.params),
        num_buckets=len(buckets),
        total_seconds=total,
        buckets_seconds=sum(whole for _, whole in clocks),
        broadcast_seconds=sum(sent for sent, _ in clocks),
    )


async def join(engine: SGLangServer) -> UpdateGroup:
    rendezvous = await Rendezvous.open(
        address=host_address() if "127.0.0.1" not in engine.name else "127.0.0.1",
        backend="gloo",
        name=f"bench-{uuid.uuid4().hex[:8]}",
        epoch=1,
        world_size=1 + engine.num_ranks,
        timeout=600.0,
        connect_timeout=60.0,
    )
    joining = asyncio.create_task(engine.join(CALL, rendezvous.spec, rank_offset=1))
    members = dict.fromkeys(range(1, 1 + engine.num_ranks), engine.name)
    group = await rendezvous.complete(members, hello=False)
    await joining
    return group


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--wire", choices=("flattened_bucket", "per_tensor"), default="flattened_bucket")
    parser.add_argument("--bucket-mb", type=float, default=64.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    made = asyncio.run(main(options.url, options.checkpoint, WireFormat(options.wire), int(options.bucket_mb * 2**20)))
    print(
        f"{made.wire}: {made.nbytes / 1e6:.1f} MB in {made.num_tensors} tensors, {made.num_buckets} buckets: "
        f"{made.total_seconds:.2f} s, {made.nbytes / 1e9 / made.total_seconds:.2f} GB/s, "
        f"{made.engine_share:.0%} of the buckets' time in the server's own loading"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({**asdict(made), "engine_share": made.engine_share}, indent=2) + "\n")
