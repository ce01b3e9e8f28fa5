"""Which engines a broadcaster serves, and what it knows of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from async_wsync.core.engine_state import Roster
from async_wsync.types import RolloutEngine

__all__ = ["Fleet"]


class Fleet:
    """Engines by name, in the order they joined, with their records."""

    def __init__(self, engines: Iterable[RolloutEngine]) -> None:
        self.roster = Roster()
        self._engines: dict[str, RolloutEngine] = {}
        self.add(engines)
        if not self._engines:
            raise ValueError("no engines: a broadcaster needs at least one to send weights to")

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def engines(self) -> tuple[RolloutEngine, ...]:
        return tuple(self._engines.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._engines)

    def add(self, engines: Iterable[RolloutEngine]) -> None:
        """Add all of them or, where one is unfit, none."""
        engines = list(engines)
        names = [_checked(engine).name for engine in engines]
        for name in names:
            if names.count(name) > 1 or name in self._engines:
                raise ValueError(f"duplicate engine {name!r}: every engine needs a name of its own, and one adapter")
        for engine in engines:
            self._engines[engine.name] = engine
            self.roster.add(engine.name)

    def remove(self, names: Iterable[str]) -> list[RolloutEngine]:
        names = list(names)
        for name in names:
            if name not in self._engines:
                raise ValueError(f"no engine named {name!r} here; there are: {', '.join(self._engines) or 'none'}")
        for name in names:
            self.roster.remove(name)
        return [self._engines.pop(name) for name in names]

    def pick(self, names: Sequence[str]) -> list[RolloutEngine]:
        return [self._engines[name] for name in names]


def _checked(engine: RolloutEngine) -> RolloutEngine:
    for verb in ("name", "num_ranks", "join", "begin", "receive", "end"):
        if not hasattr(engine, verb):
            raise ValueError(
                f"{engine!r} is not a rollout engine (it has no {verb!r}): wrap an actor handle in an adapter, "
                "TorchEngine(handle) for an actor with a WeightReceiver"
            )
    if engine.num_ranks < 1:
        raise ValueError(f"engine {engine.name!r}: num_ranks must be at least 1, got {engine.num_ranks}")
    return engine
