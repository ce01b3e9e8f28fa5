"""Whether an update fits the model that an engine serves, and the error if it does not: the same for all engines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from async_wsync.errors import BaseMissing, EngineRejected

__all__ = ["Findings", "base_missing", "rejection"]

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What an engine, or one of its ranks, finds when it compares an update's tensors with its own.

    Names may come with what is wrong with them.

    Args:
        unknown: sent, and the engine has no such tensor.
        unused: sent, and taken without an error, but put nowhere on this rank: another rank has it, or none.
        missing: tensors of the engine that the update must send and does not.
        mismatched: of another shape or dtype at the engine.
        left_out: what an update that need not be strict leaves out; None if the engine can't tell.
        lacks: why this rank does not hold what such an update builds on.
        notes: what could not be checked.
        known: all names that the engine has, if they can be listed.
    """

    unknown: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    left_out: tuple[str, ...] | None = ()
    lacks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    known: Collection[str] = ()

    @property
    def bad(self) -> bool:
        return bool(self.unknown or self.missing or self.mismatched)

    @staticmethod
    def merge(ranks: Sequence[Findings]) -> Findings:
        """What all ranks of an engine say together: a name is unused only if no rank has a use for it."""

        def union(field: str) -> tuple[str, ...]:
            return tuple(dict.fromkeys(name for rank in ranks for name in getattr(rank, field)))

        nowhere = set(ranks[0].unused).intersection(*(rank.unused for rank in ranks[1:]))
        unknown = dict.fromkeys([*union("unknown"), *(name for name in ranks[0].unused if name in nowhere)])
        return Findings(
            unknown=tuple(unknown),
            missing=union("missing"),
            mismatched=union("mismatched"),
            left_out=union("left_out"),
            lacks=union("lacks"),
            notes=union("notes"),
        )

    def rejection(self, *, engine: str = "") -> EngineRejected:
        return rejection(
            unknown=self.unknown, missing=self.missing, mismatched=self.mismatched, known=self.known, engine=engine
        )


def rejection(
    *,
    unknown: Sequence[str] = (),
    missing: Sequence[str] = (),
    mismatched: Sequence[str] = (),
    known: Collection[str] = (),
    engine: str = "",
) -> EngineRejected:
    """The error, which shows the first few names of each kind; its attributes have all.

    ``known``: all names that the engine has, as far as it can tell. If the update's names are the engine's but for a
    prefix, one line says just that.
    """
    kinds = {"unknown here": unknown, "missing in the update": missing, "mismatched": mismatched}
    parts = [f"{len(names)} {kind} ({_first_few(names)})" for kind, names in kinds.items() if names]
    prefixes = _other_prefix(unknown, {*known, *missing})
    if prefixes is not None and not mismatched:
        renamed = {_renamed(name, *prefixes) for name in unknown}
        if renamed.issuperset(missing):
            parts = []
        parts.append(_advice(unknown, *prefixes))
    elif unknown or missing:
        parts.append("give the source rename=, tied='each' if the engine does not tie, or strict=False for a part")
    return EngineRejected(
        f"{engine}{': ' if engine else ''}the update does not fit: {'; '.join(parts)}",
        unknown=tuple(unknown),
        missing=tuple(missing),
        mismatched=tuple(mismatched),
        **({"engine": engine, "phase": "check"} if engine else {}),
    )


def base_missing(
    why: str, left_out: Sequence[str], *, holds: int | None, torn: bool = False, engine: str = ""
) -> BaseMissing:
    """The error of an engine that a partial update would leave with a mix. ``left_out``: empty if it can't tell."""
    what = f"leaves out {len(left_out)} tensors ({_first_few(left_out)})" if left_out else "may leave tensors out"
    return BaseMissing(
        f"{engine}{': ' if engine else ''}the update {what}, and {why}; send it all of the model once",
        missing=tuple(left_out),
        holds=None if torn else holds,
        torn=torn,
        **({"engine": engine, "phase": "check"} if engine else {}),
    )


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _advice(unknown: Sequence[str], sent: str, here: str) -> str:
    name = unknown[0]
    how = f"name.removeprefix({sent!r})" if sent else "name"
    how = f"{here!r} + {how}" if here else how
    return (
        f"{len(unknown)} names differ from this engine's by a prefix only: {name!r} was sent, "
        f"{_renamed(name, sent, here)!r} is here: give the source rename=lambda name: {how}"
    )


def _renamed(name: str, sent: str, here: str) -> str:
    return here + name.removeprefix(sent)


def _other_prefix(unknown: Sequence[str], known: Collection[str]) -> tuple[str, str] | None:
    """Two prefixes, of which the first before each unknown name stands for the second before a known one."""
    if not unknown or not known:
        return None
    for sent, here in _candidates(unknown[0], known):
        if sent and here and len(unknown) == 1:
            continue  # any two names have as much in common
        if all(name.startswith(sent) and _renamed(name, sent, here) in known for name in unknown):
            return sent, here
    return None


def _candidates(name: str, known: Collection[str]) -> Iterator[tuple[str, str]]:
    start = 0
    while True:
        sent, rest = name[:start], name[start:]
        if rest in known:
            yield sent, ""
        yield from ((sent, k.removesuffix(rest)) for k in known if k.endswith(f".{rest}"))
        start = name.find(".", start) + 1
        if not start:
            return
