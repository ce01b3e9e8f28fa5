"""``async-wsync push CHECKPOINT --sglang URL ... --vllm URL ...``: new weights into running servers, without a restart.

Exit codes: 0 every server serves the new version (or, with ``--dry-run``, would take it), 1 the push failed, 2 wrong
usage, 3 a server refused the checkpoint before anything was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_wsync.errors import BaseMissing, EngineDied, EngineFailed, EngineRejected, WeightSyncError

if TYPE_CHECKING:
    from async_wsync.protocols import RolloutEngine

__all__ = ["add_push_command"]

OK, FAILED, REFUSED = 0, 1, 3
API_KEY = "ASYNC_WSYNC_API_KEY"


def add_push_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``push``. It sets ``run``, a function from the arguments to the exit code."""
    push = commands.add_parser(
        "push",
        help="push a checkpoint into running SGLang and vLLM servers",
        description="Broadcasts a Hugging Face checkpoint (safetensors) into running servers, all at once, without "
        "restarting them. Nothing is sent before every server has agreed to the names and shapes.",
        epilog=f"The servers' API key, if they have one, is read from the environment variable {API_KEY}.",
    )
    push.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a directory with *.safetensors, or one file")
    push.add_argument(
        "--sglang", action="append", default=[], metavar="URL", help="an SGLang server; give it once for each server"
    )
    push.add_argument(
        "--vllm",
        action="append",
        default=[],
        metavar="URL[,RANKS]",
        help="a vLLM server with this library's weight transfer backend; RANKS if it has more than one (TP x PP x DP)",
    )
    push.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto", help="default: %(default)s")
    push.add_argument(
        "--pause-mode",
        choices=("abort", "drain", "recompute", "keep"),
        default="recompute",
        help="what happens to running requests (default: %(default)s; SGLang has no drain)",
    )
    push.add_argument("--version", type=int, metavar="N", help="default: one more than the highest any server has")
    push.add_argument("--verify", choices=("engines", "source"), help="compare checksums before the version is given")
    push.add_argument(
        "--partial", action="store_true", help="the checkpoint may lack tensors, for servers on the last pushed version"
    )
    push.add_argument("--dtype", metavar="NAME", help="cast floating point tensors, e.g. bfloat16")
    push.add_argument("--bucket-mb", type=float, default=64.0, metavar="MB", help="default: %(default)g")
    push.add_argument("--per-tensor", action="store_true", help="for SGLang servers too old for flattened buckets")
    push.add_argument("--master-address", metavar="HOST", help="this machine's address, as the servers reach it")
    push.add_argument("--patience", type=float, default=1.0, metavar="X", help="multiply every time limit by this")
    push.add_argument("--dry-run", action="store_true", help="check names and shapes with every server, send nothing")
    push.add_argument("--json", type=Path, metavar="PATH", help="write the report there ('-': standard output)")
    push.add_argument("--quiet", action="store_true", help="no bar")
    push.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.sglang and not arguments.vllm:
        raise ValueError("give at least one --sglang URL or --vllm URL")
    try:
        import httpx  # noqa: F401
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ValueError(f"push needs {error.name}: pip install 'async-wsync[http,safetensors]'") from error
    try:
        return asyncio.run(_push(arguments))
    except EngineRejected as error:
        _complain(error)
        return REFUSED
    except WeightSyncError as error:
        _complain(error)
        return FAILED


async def _push(arguments: argparse.Namespace) -> int:
    from async_wsync.broadcaster import WeightBroadcaster
    from async_wsync.sources import SafetensorsSource
    from async_wsync.types import Timeouts

    source = SafetensorsSource(arguments.checkpoint, dtype=_dtype(arguments.dtype))
    limits = Timeouts().scaled(arguments.patience)
    engines: list[RolloutEngine] = []
    try:
        await _meet(arguments, engines, limits.connect)
        has = await _version_of(engines, limits.begin)
        version = arguments.version if arguments.version is not None else (has or 0) + 1
        base = has if arguments.partial else None
        if arguments.dry_run:
            return await _dry_run(arguments, engines, source, version, base, limits.begin)
        async with WeightBroadcaster(
            engines,
            lock=None,
            backend=arguments.backend,
            bucket_bytes=int(arguments.bucket_mb * 1024 * 1024),
            timeouts=limits,
            progress=not arguments.quiet,
            pause_mode=arguments.pause_mode,
            min_engines=len(engines),
            master_address=arguments.master_address,
        ) as broadcaster:
            report = await broadcaster.update_weights(
                source, version=version, strict=not arguments.partial, base=base, verify=arguments.verify
            )
    finally:
        for engine in engines:
            await engine.aclose()
    if str(arguments.json) != "-":
        print(report.summary())
    _write_json(arguments.json, report.to_dict())
    return OK


async def _meet(arguments: argparse.Namespace, engines: list[RolloutEngine], timeout: float) -> None:
    """Fill ``engines``, which the caller closes whatever happens here."""
    from async_wsync.engines.sglang.server import SGLangServer
    from async_wsync.engines.vllm.engine import VLLMServer
    from async_wsync.types import WireFormat

    key = os.environ.get(API_KEY)
    for text in arguments.vllm:
        url, _, ranks = text.partition(",")
        if ranks and not ranks.isdecimal():
            raise ValueError(f"--vllm takes URL or URL,RANKS, got {text!r}")
        engines.append(VLLMServer(url, num_ranks=int(ranks or 1), api_key=key))
    wire = WireFormat.PER_TENSOR if arguments.per_tensor else WireFormat.FLATTENED
    for url in arguments.sglang:
        engine = await SGLangServer.discover(url, timeout=timeout, api_key=key, wire_format=wire)
        engines.append(engine)


async def _version_of(engines: Sequence[RolloutEngine], timeout: float) -> int | None:
    """The highest version that a server has, None where no update gave one; every server must answer for it."""
    from async_wsync.types import Call

    call = Call(source="async-wsync push", fence=0, timeout=timeout)
    infos = await asyncio.gather(*(engine.hello(call) for engine in engines))
    return max((info.version for info in infos if info.version is not None), default=None)


async def _dry_run(
    arguments: argparse.Namespace,
    engines: Sequence[RolloutEngine],
    source: Any,
    version: int,
    base: int | None,
    timeout: float,
) -> int:
    """Ask every server whether the checkpoint fits; say what each answers."""
    from async_wsync.runtime.threads import DaemonWorker
    from async_wsync.transfer.plan import plan_buckets
    from async_wsync.types import Base, Call, UpdateSpec

    files = DaemonWorker("push-manifest")
    manifest = await files.run(source.manifest)
    files.close()
    buckets = plan_buckets(manifest, bucket_bytes=int(arguments.bucket_mb * 1024 * 1024))
    update = UpdateSpec(
        update_id="dry-run",
        version=version,
        manifest=manifest,
        buckets=buckets,
        group="",
        strict=not arguments.partial,
        base=None if base is None else Base(version=base, update_id=None),
    )
    call = Call(source="async-wsync push", fence=0, timeout=timeout)
    answers = await asyncio.gather(*(engine.check(call, update) for engine in engines), return_exceptions=True)
    found: dict[str, dict[str, Any]] = {}
    worst = OK
    for engine, answer in zip(engines, answers, strict=True):
        if isinstance(answer, BaseException):
            if not isinstance(answer, EngineFailed):
                raise answer
            worst = max(worst, REFUSED if isinstance(answer, EngineRejected) else FAILED)
            found[engine.name] = {"fits": False, "error": str(answer)}
        else:
            found[engine.name] = {"fits": True, "notes": list(answer)}
    size = sum(bucket.nbytes for bucket in buckets)
    if str(arguments.json) != "-":
        parcels = "1 bucket" if len(buckets) == 1 else f"{len(buckets)} buckets"
        print(f"{len(manifest.params)} tensors, {size / 1e6:.1f} MB, {parcels}; nothing was sent")
        for name, result in found.items():
            print(f"  {name}: {'fits' if result['fits'] else result['error']}")
            for note in result.get("notes", ()):
                print(f"    note: {note}")
    _write_json(
        arguments.json,
        {"dry_run": True, "version": version, "num_tensors": len(manifest.params), "nbytes": size, "engines": found},
    )
    return worst


def _dtype(name: str | None) -> Any:
    if name is None:
        return None
    from async_wsync.transfer.tensors import torch_dtype

    return torch_dtype(name)


def _write_json(path: Path | None, data: dict[str, Any]) -> None:
    if path is None:
        return
    text = json.dumps(data, indent=2) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        path.write_text(text)


def _complain(error: WeightSyncError) -> None:
    print(f"async-wsync push: {error}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(f"  {note}", file=sys.stderr)
    if advice := _advice(error):
        print(f"What to do: {advice}", file=sys.stderr)


def _advice(error: WeightSyncError) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, WeightSyncError) else error
    if isinstance(cause, EngineDied):
        return (
            "check that the server runs and that its URL and port are right, then push again; a push heals the others"
        )
    if isinstance(cause, BaseMissing):
        return "push a whole checkpoint to that server once, without --partial"
    if isinstance(cause, EngineRejected):
        return "push a checkpoint of the model that the server was started with (--dry-run shows the differences)"
    if isinstance(cause, TimeoutError):
        return "look at the server's log; if it only needs longer, push again with --patience 3"
    return ""
