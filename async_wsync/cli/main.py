"""The ``async-wsync`` command. Each subcommand imports what it needs only when it runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["main"]

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 fine, 1 it failed, 2 wrong usage, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    command: Command = arguments.run
    try:
        return command(arguments)
    except ValueError as error:
        print(f"async-wsync: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("async-wsync: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    from async_wsync import __version__
    from async_wsync.cli.lock import add_lock_commands
    from async_wsync.cli.push import add_push_command

    parser = argparse.ArgumentParser(
        prog="async-wsync", description="Broadcasts new model weights from a trainer into running rollout engines."
    )
    parser.add_argument("--version", action="version", version=f"async-wsync {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    add_lock_commands(commands)
    add_push_command(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small model while Ray engines generate and take each new version",
        description="Trains a small transformer on the help texts that ship with Python, while Ray engines generate "
        "with it and take each new version. Ends with a table, and with exit code 1 where an engine differs "
        "from the trainer.",
    )
    demo.add_argument("--updates", type=int, default=20, metavar="N", help="weight updates (default %(default)s)")
    demo.add_argument("--engines", type=int, default=2, metavar="N", help="rollout engines (default %(default)s)")
    demo.add_argument(
        "--steps", type=int, default=60, metavar="N", help="training steps an update (default %(default)s)"
    )
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="of the model, the batches and the samples")
    demo.add_argument(
        "--sources", type=int, default=1, metavar="N", help="1, or 2: two pipeline stages share each update (default 1)"
    )
    demo.add_argument(
        "--kill-engine-at",
        type=int,
        metavar="N",
        help="kill an engine in the middle of update N; another takes its place",
    )
    demo.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    demo.add_argument("--address", metavar="ADDRESS", help="join this Ray cluster ('auto': the one running here)")
    demo.set_defaults(run=_run_demo)


def _run_demo(arguments: argparse.Namespace) -> int:
    from async_wsync.demo.run import DemoOptions, run_demo

    options = DemoOptions(
        updates=arguments.updates,
        engines=arguments.engines,
        steps=arguments.steps,
        seed=arguments.seed,
        address=arguments.address,
        sources=arguments.sources,
        kill_engine_at=arguments.kill_engine_at,
    )
    result = run_demo(options, out=lambda line: print(line, flush=True))
    print(result.table(), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result.to_dict(), indent=2) + "\n")
    return 0 if result.ok else 1
