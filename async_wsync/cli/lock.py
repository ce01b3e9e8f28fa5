"""``async-wsync lock status|break``: look at a running lock, and take it from a holder that will not give it back.

Exit codes: 0 answered (or revoked), 3 held (``status --check``) or not held by that claim (``break``), 4 no such lock,
5 no answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from async_wsync.errors import LockUnavailable

if TYPE_CHECKING:
    from async_wsync.lock import BroadcastLock

__all__ = ["add_lock_commands", "table"]

OK, HELD, NO_SUCH_LOCK, NO_ANSWER = 0, 3, 4, 5


def add_lock_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``lock`` and its two verbs. Each sets ``run``, a function from the arguments to the exit code."""
    lock = commands.add_parser("lock", help="look at a broadcast lock, or take it from its holder")
    verbs = lock.add_subparsers(title="commands", required=True, metavar="COMMAND")

    status = verbs.add_parser("status", help="who holds it, what they are doing, who waits")
    _add_common(status)
    status.add_argument("--json", action="store_true", help="print one JSON object (with --watch: one a line)")
    status.add_argument(
        "--watch", nargs="?", type=float, const=1.0, metavar="SECONDS", help="again and again, every second by default"
    )
    status.add_argument("--check", action="store_true", help="exit with 3 where the lock is held")
    status.set_defaults(run=_run_status)

    break_ = verbs.add_parser(
        "break",
        help="end one lease: the next holder gets a higher fence, and engines refuse the old one's buckets",
        description="Ends the lease of --claim, as `lock status` shows it, and of no other. Its holder is told by its "
        "next heartbeat. Engines that check fences refuse what it still sends; see docs/lock.md for the others.",
    )
    _add_common(break_)
    break_.add_argument("--claim", required=True, metavar="ID", help="the holder's claim, or its first 6 characters")
    break_.set_defaults(run=_run_break)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the lock's name")
    parser.add_argument("--namespace", metavar="NAME", help="Ray namespace (default: wherever the name is found)")
    parser.add_argument("--address", default="auto", metavar="ADDRESS", help="Ray cluster (default: the one here)")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="limit (default %(default)s)")


def _run_status(arguments: argparse.Namespace) -> int:
    async def run(lock: BroadcastLock) -> int:
        while True:
            status = await lock.status(timeout=arguments.timeout)
            if arguments.json:
                print(json.dumps(status, indent=None if arguments.watch else 2), flush=True)
            else:
                clear = "\033[2J\033[H" if arguments.watch and sys.stdout.isatty() else ""
                print(clear + table(status), flush=True)
            if not arguments.watch:
                return HELD if arguments.check and status["held"] else OK
            await asyncio.sleep(arguments.watch)

    return _with_lock(arguments, run)


def _run_break(arguments: argparse.Namespace) -> int:
    async def run(lock: BroadcastLock) -> int:
        holder = (await lock.status(timeout=arguments.timeout))["holder"]
        claim = str(holder["claim"]) if holder else ""
        wanted = str(arguments.claim)
        if holder is None or not claim.startswith(wanted) or len(wanted) < min(6, len(claim)):
            print(f"claim {wanted} does not hold {arguments.name!r}: nothing done", file=sys.stderr)
            return HELD
        if not await lock.revoke(claim, timeout=arguments.timeout):
            print(f"claim {wanted} has just ended by itself: nothing done", file=sys.stderr)
            return HELD
        print(f"revoked: {holder['label']} (pid {holder['pid']} on {holder['host']}), fence {holder['fence']}")
        return OK

    return _with_lock(arguments, run)


def _with_lock(arguments: argparse.Namespace, run: Callable[[BroadcastLock], Coroutine[Any, Any, int]]) -> int:
    import ray

    from async_wsync.lock import BroadcastLock

    started = not ray.is_initialized()
    try:
        if started:
            ray.init(address=arguments.address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError) as error:
        print(f"async-wsync: no Ray cluster at {arguments.address!r}: {error}", file=sys.stderr)
        return NO_ANSWER
    try:
        namespace = arguments.namespace or _find(arguments.name)
        if namespace is None:
            print(f"async-wsync: no lock {arguments.name!r} in this cluster", file=sys.stderr)
            return NO_SUCH_LOCK
        return asyncio.run(run(BroadcastLock.connect(name=arguments.name, namespace=namespace)))
    except LockUnavailable as error:
        print(f"async-wsync: {error}", file=sys.stderr)
        return NO_SUCH_LOCK if isinstance(error.__cause__, ValueError) else NO_ANSWER
    finally:
        if started:
            ray.shutdown()


def _find(name: str) -> str | None:
    """The namespace that has an actor of this name. ValueError where several have."""
    from ray.util import list_named_actors

    found = [entry["namespace"] for entry in list_named_actors(all_namespaces=True) if entry["name"] == name]
    if len(found) > 1:
        raise ValueError(f"{name!r} is in several namespaces, name one with --namespace: {', '.join(sorted(found))}")
    return str(found[0]) if found else None


def table(status: dict[str, Any]) -> str:
    """A status for people."""
    lines = [f"lock {status['name']}   lease {status['ttl']:g} s   grants {status['num_grants']}"]
    if status["quarantine_left"] > 0:
        lines.append(f"  the server has restarted, and grants nothing for another {status['quarantine_left']:.1f} s")
    holder = status["holder"]
    if holder is None:
        lines.append("  free")
    else:
        left = "no end" if holder["lease_left"] is None else f"{holder['lease_left']:.1f} s"
        rows = [
            ("holder", holder["label"]),
            ("host", holder["host"]),
            ("pid", str(holder["pid"])),
            ("actor", holder["actor_id"] or "(a driver)"),
            ("stage", f"{holder['stage'] or '-'}   (for {holder['stage_for']:.1f} s)"),
            ("held for", f"{holder['held_for']:.1f} s"),
            ("lease left", left),
            ("fence", str(holder["fence"])),
            ("claim", holder["claim"]),
        ]
        lines += [f"  {name:<11}{value}" for name, value in rows]
    lines.append(f"waiting: {len(status['waiters']) or 'nobody'}")
    lines += [
        f"  {n}. {w['label']} (pid {w['pid']} on {w['host']}) for {w['waiting_for']:.1f} s"
        for n, w in enumerate(status["waiters"], 1)
    ]
    if status["transitions"]:
        lines.append("last transitions:")
    for event in status["transitions"][-8:]:
        fence = f"  fence {event['fence']}" if event["fence"] else ""
        lines.append(f"  {event['ago']:8.1f} s ago  {event['what']:<26} {event['label']}{fence}")
    return "\n".join(lines)
