"""The lock's simulator: --seeds N of it, or --seed N --trace to replay one, or --variant NAME with a rule broken."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable

from tests.sim.variants import VARIANTS
from tests.sim.world import Rules, World

__all__ = ["run_seed", "run_seeds"]

CHUNK = 500


def run_seed(seed: int, variant: str | None = None, *, trace: bool = False) -> list[str]:
    """The violations of one seed; none for the true rules."""
    rules = Rules() if variant is None else VARIANTS[variant]
    return World(seed, rules, trace=trace).run().violations


def _run_chunk(seeds: range) -> tuple[list[str], Counter[str]]:
    violations: list[str] = []
    seen: Counter[str] = Counter()
    for seed in seeds:
        checks = World(seed).run()
        violations += checks.violations
        seen.update(checks.faults_seen)
        seen.update(
            {
                "grants": checks.num_grants,
                "buckets applied": checks.num_applied,
                "buckets refused": checks.num_refused,
                "leases lost": checks.num_lost,
            }
        )
    return violations, seen


def run_seeds(first: int, count: int, *, processes: int = 1) -> tuple[list[str], Counter[str]]:
    """(violations, what happened how often) over ``count`` seeds from ``first``."""
    chunks = [range(n, min(n + CHUNK, first + count)) for n in range(first, first + count, CHUNK)]
    violations: list[str] = []
    seen: Counter[str] = Counter()

    def gather(results: Iterable[tuple[list[str], Counter[str]]]) -> None:
        for found, counts in results:
            violations.extend(found)
            seen.update(counts)

    if processes == 1:
        gather(map(_run_chunk, chunks))
    else:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            gather(pool.imap_unordered(_run_chunk, chunks))
    return violations, seen


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--variant", choices=sorted(VARIANTS))
    parser.add_argument("--trace", action="store_true")
    given = parser.parse_args()
    if given.seed is not None:
        violations = run_seed(given.seed, given.variant, trace=given.trace)
        print("\n".join(violations) or f"seed {given.seed}: no violation")
        return 1 if violations else 0
    if given.variant is not None:
        for seed in range(given.first, given.first + given.seeds):
            if violations := run_seed(seed, given.variant):
                print(f"caught: {violations[0]}")
                return 0
        print(f"not caught in {given.seeds} seeds")
        return 1
    started = time.monotonic()
    violations, seen = run_seeds(given.first, given.seeds, processes=given.processes)
    print(f"{given.seeds} seeds in {time.monotonic() - started:.0f} s, {len(violations)} violations")
    print("\n".join(f"  {what}: {count}" for what, count in sorted(seen.items())))
    print("\n".join(violations[:20]))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
