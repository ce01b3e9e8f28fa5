"""How an engine says that an update does not fit the model it serves: the same for all engines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from async_wsync.errors import BaseMissing, EngineRejected

__all__ = ["base_missing", "rejection"]

_SHOWN = 5


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
    """The error of an engine that a partial update would leave with a mix. ``left_out``: empty where it can't tell."""
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
