"""Whether the engines hold what was sent.

By our checksums, if they can tell them. SGLang hashes fused and sharded tensors its own way: two such engines can still
be compared with each other, and a few rows of each tensor with the source.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from async_wsync.errors import EngineFailed
from async_wsync.transfer.checksum import combined_digest
from async_wsync.types import Call, Manifest

__all__ = ["HasOwnChecks", "check_own", "compare_checksums"]

#: Tensors sampled, spread over the manifest: a call each.
MAX_SAMPLES = 32
#: An engine may hold its weights in bfloat16, whatever was sent: 8 bits of mantissa.
RELATIVE, ABSOLUTE = 2.0**-7, 1e-5


@runtime_checkable
class HasOwnChecks(Protocol):
    """What `SGLangServer` has on top of a `RolloutEngine`."""

    @property
    def name(self) -> str: ...
    @property
    def num_ranks(self) -> int: ...
    async def own_checksums(self, call: Call) -> dict[str, str] | None: ...
    async def sample(self, call: Call, names: Sequence[str], *, rows: int = 1) -> dict[str, Any]: ...


#: Makes one call of every engine, all at once; the answers by engine name.
Ask = Callable[[Callable[[Any, Call], Coroutine[Any, Any, Any]]], Awaitable[Mapping[str, Any]]]


def compare_checksums(
    told: dict[str, dict[str, str]], manifest: Manifest, wanted: Mapping[str, str] | None
) -> str | None:
    """The digest of all tensors that every engine holds. Raises `EngineFailed` for the first engine that differs.

    ``told``: digests by tensor name, by engine name; empty afterwards, as to free all of them at once would hold up the
    event loop. ``wanted``: the source's, or None to compare the engines with each other.
    """
    names = [meta.name for meta in manifest.params]
    first = "the source"
    for engine in list(told):
        digests = told.pop(engine)
        if wanted is None:
            wanted, first = {name: digests[name] for name in names if name in digests}, engine
        differing = [name for name in names if digests.get(name) != wanted.get(name)]
        if differing:
            raise EngineFailed(
                f"{engine}: {len(differing)} tensors differ from {first} after the update, "
                f"first {', '.join(differing[:3])}",
                engine=engine,
                phase="verify",
            )
    return combined_digest(wanted) if wanted else None


async def check_own(
    engines: Sequence[HasOwnChecks],
    ask: Ask,
    *,
    against: Literal["engines", "source"],
    manifest: Manifest,
    first_rows: Callable[[Sequence[str]], Awaitable[Mapping[str, Any] | None]],
) -> dict[str, str]:
    """What was found, in words, by engine name. Raises `EngineFailed` for the first engine that differs.

    ``first_rows(names)``: the source's first rows as nested lists, or None where it can't be read again.
    """
    if against == "engines":
        return _with_each_other(engines, await ask(lambda engine, call: engine.own_checksums(call)))
    names = _spread([meta.name for meta in manifest.params])
    rows = await first_rows(names)
    if rows is None:
        return {engine.name: "not verified: the source can't be read a second time" for engine in engines}
    samples = await ask(lambda engine, call: engine.sample(call, list(rows)))
    return {engine.name: _with_source(engine.name, samples[engine.name], rows) for engine in engines}


def _with_each_other(engines: Sequence[HasOwnChecks], answers: Mapping[str, dict[str, str] | None]) -> dict[str, str]:
    notes: dict[str, str] = {}
    models: dict[tuple[type, int], tuple[str, dict[str, str]]] = {}  # the first of each kind that can be compared
    for engine in engines:
        sums = answers[engine.name]
        if sums is None:
            notes[engine.name] = "not verified: it has no checksums"
            continue
        first, wanted = models.setdefault((type(engine), engine.num_ranks), (engine.name, sums))
        if first == engine.name:
            notes[engine.name] = "its own checksums are what others of its kind are compared with"
            continue
        differing = sorted(name for name in wanted.keys() | sums.keys() if wanted.get(name) != sums.get(name))
        if differing:
            raise _differs(engine.name, differing, first)
        notes[engine.name] = f"{len(sums)} checksums of its own equal {first}'s"
    return notes


def _with_source(name: str, held: Mapping[str, Any], rows: Mapping[str, Any]) -> str:
    differing = [param for param, values in held.items() if not _close(rows[param], values)]
    if differing:
        raise _differs(name, differing, "the source")
    if not held:
        return "not verified: it gives no samples of its weights"
    return f"the first rows of {len(held)} tensors equal the source's, to bfloat16's precision"


def _differs(name: str, differing: Sequence[str], other: str) -> EngineFailed:
    return EngineFailed(
        f"{name}: {len(differing)} tensors differ from {other} after the update, first {', '.join(differing[:3])}",
        engine=name,
        phase="verify",
    )


def _spread(names: Sequence[str]) -> list[str]:
    if len(names) <= MAX_SAMPLES:
        return list(names)
    return [names[i * len(names) // MAX_SAMPLES] for i in range(MAX_SAMPLES)]


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_close(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, list) or isinstance(other, list):
        return False
    return abs(float(one) - float(other)) <= ABSOLUTE + RELATIVE * abs(float(one))
