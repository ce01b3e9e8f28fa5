"""Seconds and GB/s of weight updates into one running SGLang server, and the share of SGLang's own loading.

    python benchmarks/sglang_update.py URL CHECKPOINT [--updates 3] [--per-tensor]

For each bucket two clocks run: until the broadcast is over at this end, and until the server has answered. The
difference counts as the server's loading: unpacking, and copying into its parameters, fused and sharded.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from async_wsync import WeightBroadcaster
from async_wsync.engines.sglang.server import SGLangServer
from async_wsync.sources import SafetensorsSource
from async_wsync.types import BucketSpec, Call, PauseMode, UpdateSpec, WireFormat

MIB = 1024 * 1024


class TimedServer(SGLangServer):
    """Adds up what each bucket's call takes after the broadcast. Buckets come one at a time."""

    load_seconds = 0.0
    _sent_at: float | None = None

    async def receive(self, call: Call, update: UpdateSpec, bucket: BucketSpec) -> None:
        self._sent_at = None
        await super().receive(call, update, bucket)
        if self._sent_at is not None:
            self.load_seconds += time.perf_counter() - self._sent_at

    def hint_collective_done(self) -> None:
        self._sent_at = time.perf_counter()


async def measure(url: str, checkpoint: Path, *, wire: WireFormat, bucket_bytes: int, updates: int) -> None:
    engine = TimedServer(url, wire_format=wire)
    source = SafetensorsSource(checkpoint)
    async with WeightBroadcaster(
        [engine],
        lock=None,
        backend="gloo",
        bucket_bytes=bucket_bytes,
        pause_mode=PauseMode.RECOMPUTE,
        progress=False,
    ) as broadcaster:
        for _ in range(updates):
            engine.load_seconds = 0.0
            report = await broadcaster.update_weights(source, version=time.time_ns() // 1_000_000)
            loading, sending = engine.load_seconds, report.phases["receive"]
            print(
                f"| {wire} | {report.nbytes / 1e6:.1f} MB | {report.num_tensors} | {report.num_buckets} | "
                f"{report.seconds:.2f} s | {sending:.2f} s | {report.nbytes / report.seconds / 1e9:.3f} GB/s | "
                f"{report.nbytes / sending / 1e9:.3f} GB/s | {loading:.3f} s ({loading / report.seconds:.0%}) |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--per-tensor", action="store_true")
    parser.add_argument("--bucket-mb", type=float, default=64.0)
    args = parser.parse_args()
    wire = WireFormat.PER_TENSOR if args.per_tensor else WireFormat.FLATTENED
    print("| wire | bytes | tensors | buckets | update | broadcast | whole | broadcast alone | loading |")
    print("|---|---|---|---|---|---|---|---|---|")
    bucket_bytes = int(args.bucket_mb * MIB)
    asyncio.run(measure(args.url, args.checkpoint, wire=wire, bucket_bytes=bucket_bytes, updates=args.updates))


if __name__ == "__main__":
    main()
