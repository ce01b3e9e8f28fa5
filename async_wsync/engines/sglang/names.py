"""Whether an SGLang engine knows these tensors: checked before the first byte, since SGLang itself does not tell.

SGLang drops a tensor whose name it does not know, answers 200 and counts the new version. Its API can't list its
parameters under the names that a checkpoint has (it fuses q, k and v). Two ways are left: to read the checkpoint that
it was started from, if this process can, and to ask for one row of each tensor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from async_wsync.engines.rejection import Findings, base_missing
from async_wsync.engines.sglang.checkpoint_index import CheckpointIndex
from async_wsync.engines.sglang.messages import shape_of
from async_wsync.types import Manifest, ParamMeta, UpdateSpec

__all__ = ["against_index", "by_probing", "check_base", "not_checked"]

#: At most so many tensors are asked for, one call each.
MAX_PROBES = 256
_OUTPUT_LAYER = "lm_head.weight"

Probe = Callable[[str], Awaitable[Any]]


def against_index(update: UpdateSpec, index: CheckpointIndex) -> Findings:
    """Compare with the checkpoint that the engine was started from."""
    unknown, mismatched = [], []
    for meta in update.manifest.params:
        known = index.shapes.get(meta.name)
        if known is None:
            if not (index.ties_embeddings and meta.name == _OUTPUT_LAYER):
                unknown.append(meta.name)
        elif known != meta.shape:
            mismatched.append(f"{meta.name}: sent {list(meta.shape)}, there {list(known)}")
    left_out = _missing(update.manifest, index)
    return Findings(
        unknown=tuple(unknown),
        missing=left_out if update.strict else (),
        mismatched=tuple(mismatched),
        left_out=left_out,
        known=index.shapes.keys(),
    )


def _missing(manifest: Manifest, index: CheckpointIndex) -> tuple[str, ...]:
    """An alias is not sent. SGLang fills it only if the model itself ties the two."""
    covered = {meta.name for meta in manifest.params}
    if index.ties_embeddings:
        covered |= {alias for alias, _ in manifest.aliases} | {_OUTPUT_LAYER}
    return tuple(name for name in index.shapes if name not in covered)


async def by_probing(manifest: Manifest, probe: Probe) -> Findings:
    """Ask for one row of up to `MAX_PROBES` tensors. ``probe(name)`` returns None for a refusal."""
    asked = _spread(manifest.params, MAX_PROBES)
    answers = [(meta, await probe(meta.name)) for meta in asked]
    if all(rows is None for _, rows in answers):
        return not_checked(
            "names and shapes could not be checked: its checkpoint is not readable from here, and it has "
            "no /get_weights_by_name for this model"
        )
    unknown, mismatched, notes = [], [], []
    for meta, rows in answers:
        if rows is None:
            unknown.append(meta.name)
        elif not _fits(meta.shape, shape_of(rows)):
            mismatched.append(f"{meta.name}: sent {list(meta.shape)}, there {[*shape_of(rows)]} in its first row")
    if len(asked) < len(manifest.params):
        notes.append(f"names checked by probing {len(asked)} of {len(manifest.params)} tensors")
    notes.append("tensors that the update leaves out could not be checked: its checkpoint is not readable from here")
    return Findings(unknown=tuple(unknown), mismatched=tuple(mismatched), left_out=None, notes=tuple(notes))


def not_checked(note: str) -> Findings:
    return Findings(left_out=None, notes=(note,))


def _spread(params: tuple[ParamMeta, ...], limit: int) -> list[ParamMeta]:
    if len(params) <= limit:
        return list(params)
    return [params[i * len(params) // limit] for i in range(limit)]


def _fits(sent: tuple[int, ...], seen: tuple[int, ...]) -> bool:
    """``seen`` is cut to one row, so only the rest of the shape can be compared."""
    return len(sent) == len(seen) and sent[1:] == seen[1:]


def check_base(update: UpdateSpec, left_out: tuple[str, ...] | None, *, holds: int | None, engine: str) -> None:
    """Raise `BaseMissing` if the engine does not hold the base of an update that leaves tensors out, or may do so.

    SGLang knows versions, but neither updates nor whether it is torn: the source must know those.
    """
    if update.base is not None and update.base.version == holds:
        return
    has = "no version" if holds is None else f"version {holds}"
    wanted = "one that this update builds on" if update.base is None else f"version {update.base.version}"
    raise base_missing(f"it holds {has}, not {wanted}", left_out or (), holds=holds, engine=engine)
