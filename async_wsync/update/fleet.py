"""Which engines a broadcaster serves, and what it knows of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from async_wsync.arguments import at_least, text
from async_wsync.protocols import RolloutEngine
from async_wsync.update.roster import Roster

__all__ = ["Fleet", "listed"]

_VERBS = ("name", "num_ranks", "wire_format", "hello", "join", "leave", "begin", "receive", "end", "publish", "aclose")


class Fleet:
    """Engines by name, in the order they joined, with their records."""

    def __init__(self, engines: Iterable[RolloutEngine]) -> None:
        self.roster = Roster()
        self._engines: dict[str, RolloutEngine] = {}
        self.exchange((), engines)
        if not self._engines:
            raise ValueError("no engines: a broadcaster needs at least one to send weights to")

    @property
    def engines(self) -> tuple[RolloutEngine, ...]:
        return tuple(self._engines.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._engines)

    def after(self, leaving: Iterable[str], joining: Iterable[RolloutEngine]) -> dict[str, RolloutEngine]:
        """The engines by name as they would be after `exchange`; raises ValueError where it would."""
        out = dict.fromkeys(leaving)
        for name in out:
            if name not in self._engines:
                raise ValueError(f"no engine named {name!r} here; there are: {', '.join(self._engines) or 'none'}")
        new = _by_name(listed(joining))
        for name in new:
            if name in self._engines and name not in out:
                raise _duplicate(name)
        engines: dict[str, RolloutEngine] = {}
        for name, engine in self._engines.items():
            if name not in out:
                engines[name] = engine
            elif name == next(iter(out)):
                engines.update(new)  # in the place of the first that leaves
        return engines | new

    def exchange(self, leaving: Iterable[str], joining: Iterable[RolloutEngine]) -> list[RolloutEngine]:
        """Let these go and take those in: all of it, or none where one is unfit. The adapters that are not needed
        any more."""
        out, new = list(dict.fromkeys(leaving)), listed(joining)
        engines = self.after(out, new)
        gone = [self._engines[name] for name in out]
        self._engines = engines
        for name in out:
            self.roster.remove(name)
        for engine in new:
            self.roster.add(engine.name)
        self.roster.arrange(engines)
        return [old for old in gone if not any(old is one for one in engines.values())]

    def pick(self, names: Sequence[str]) -> list[RolloutEngine]:
        return [self._engines[name] for name in names]

    def taking_part(self, names: Sequence[str]) -> list[RolloutEngine]:
        """Of the engines that the running update is for, those that it is not left out of."""
        return [engine for engine in self.pick(names) if self.roster[engine.name].left_out is None]


def listed(engines: Any) -> list[RolloutEngine]:
    """``engines`` as a list; ValueError if they are none."""
    if isinstance(engines, str | bytes) or not isinstance(engines, Iterable):
        raise ValueError(f"engines must be a list of rollout engines, got {engines!r}")
    return list(engines)


def _by_name(engines: list[RolloutEngine]) -> dict[str, RolloutEngine]:
    found: dict[str, RolloutEngine] = {}
    for engine in engines:
        _check(engine)
        if engine.name in found:
            raise _duplicate(engine.name)
        found[engine.name] = engine
    return found


def _duplicate(name: str) -> ValueError:
    return ValueError(f"duplicate engine {name!r}: every engine needs a name of its own, and one adapter")


def _check(engine: RolloutEngine) -> None:
    for verb in _VERBS:
        if not hasattr(engine, verb):
            raise ValueError(
                f"{engine!r} is not a rollout engine (it has no {verb!r}): wrap an actor handle in an adapter, "
                "TorchEngine(handle) for an actor with a WeightReceiver"
            )
    text("the name of an engine", engine.name)
    at_least(f"engine {engine.name!r}: num_ranks", engine.num_ranks, 1)
