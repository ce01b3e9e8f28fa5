"""Does an SGLang engine know these tensors? Asked before the first byte, since SGLang does not say.

SGLang drops a tensor whose name it does not know, answers 200 and counts the new version. Its API can't list its
parameters under the names that a checkpoint has (it fuses q, k and v). Two ways are left: the checkpoint it was
started from, where this process can read it, and asking for one row of each tensor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from async_wsync.engines.rejection import base_missing, rejection
from async_wsync.engines.sglang.checkpoint_index import CheckpointIndex
from async_wsync.engines.sglang.messages import shape_of
from async_wsync.errors import EngineRejected
from async_wsync.types import Manifest, ParamMeta, UpdateSpec

__all__ = ["Findings", "against_index", "by_probing", "check_base"]

#: So many tensors are probed, one call each. More would take longer than they are worth.
MAX_PROBES = 256
_OUTPUT_LAYER = "lm_head.weight"

Probe = Callable[[str], Awaitable[Any]]


@dataclass(slots=True)
class Findings:
    """What a check of names found; ``notes`` says what it could not.

    ``left_out``: what an update that need not be strict leaves out, None where that can't be told.
    """

    unknown: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    known: Collection[str] = ()  # all names that the engine has, if they can be had
    left_out: list[str] | None = None

    @property
    def bad(self) -> bool:
        return bool(self.unknown or self.missing or self.mismatched)

    def rejection(self, *, engine: str) -> EngineRejected:
        return rejection(
            unknown=self.unknown,
            missing=self.missing,
            mismatched=self.mismatched,
            known=self.known,
            engine=engine,
        )


def against_index(update: UpdateSpec, index: CheckpointIndex) -> Findings:
    """Compare with the checkpoint that the engine was started from."""
    found = Findings(known=index.shapes.keys())
    manifest = update.manifest
    for meta in manifest.params:
        known = index.shapes.get(meta.name)
        if known is None:
            if not (index.ties_embeddings and meta.name == _OUTPUT_LAYER):
                found.unknown.append(meta.name)
        elif known != meta.shape:
            found.mismatched.append(f"{meta.name}: sent {list(meta.shape)}, there {list(known)}")
    found.left_out = _missing(manifest, index)
    if update.strict:
        found.missing.extend(found.left_out)
    return found


def _missing(manifest: Manifest, index: CheckpointIndex) -> list[str]:
    """An alias is not sent. SGLang fills it only where the model itself ties the two."""
    covered = {meta.name for meta in manifest.params}
    if index.ties_embeddings:
        covered |= {alias for alias, _ in manifest.aliases} | {_OUTPUT_LAYER}
    return [name for name in index.shapes if name not in covered]


async def by_probing(manifest: Manifest, probe: Probe) -> Findings:
    """Ask for one row of up to `MAX_PROBES` tensors. ``probe(name)`` returns None for a refusal."""
    found = Findings()
    asked = _spread(manifest.params, MAX_PROBES)
    answers = [(meta, await probe(meta.name)) for meta in asked]
    if all(rows is None for _, rows in answers):
        found.notes.append(
            "names and shapes could not be checked: its checkpoint is not readable from here, and it has "
            "no /get_weights_by_name for this model"
        )
        return found
    for meta, rows in answers:
        if rows is None:
            found.unknown.append(meta.name)
        elif not _fits(meta.shape, shape_of(rows)):
            found.mismatched.append(f"{meta.name}: sent {list(meta.shape)}, there {[*shape_of(rows)]} in its first row")
    if len(asked) < len(manifest.params):
        found.notes.append(f"names checked by probing {len(asked)} of {len(manifest.params)} tensors")
    found.notes.append(
        "tensors that the update leaves out could not be checked: its checkpoint is not readable from here"
    )
    return found


def _spread(params: tuple[ParamMeta, ...], limit: int) -> list[ParamMeta]:
    if len(params) <= limit:
        return list(params)
    return [params[i * len(params) // limit] for i in range(limit)]


def _fits(sent: tuple[int, ...], seen: tuple[int, ...]) -> bool:
    """``seen`` is cut to one row, so only the rest of the shape can be compared."""
    return len(sent) == len(seen) and sent[1:] == seen[1:]


def check_base(update: UpdateSpec, left_out: list[str] | None, *, holds: int | None, engine: str) -> None:
    """`BaseMissing` for a part of the model, or what may be one, unless the server still says the base's version.

    SGLang knows versions and no updates, and not whether it is torn: those the source must know.
    """
    if update.strict or left_out == [] or (update.base is not None and update.base.version == holds):
        return
    has = "no version" if holds is None else f"version {holds}"
    wanted = "one that this update builds on" if update.base is None else f"version {update.base.version}"
    raise base_missing(f"it holds {has}, not {wanted}", left_out or (), holds=holds, engine=engine)
