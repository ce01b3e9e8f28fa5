"""`SGLangActor`: the engine actors of slime, miles and relatives, Ray actors in front of an SGLang server each."""

from __future__ import annotations

import os
from typing import Any

from async_wsync import arguments
from async_wsync.engines.sglang.actor_transport import ActorTransport
from async_wsync.engines.sglang.engine import SGLangEngine
from async_wsync.engines.sglang.messages import Selector
from async_wsync.types import WireFormat

__all__ = ["SGLangActor"]


class SGLangActor(SGLangEngine):
    """One such actor, as a `RolloutEngine`.

    Args:
        handle: the actor's handle.
        num_ranks: GPUs of the engine behind it.
        name: for messages, unique among a broadcaster's engines.
        wire_format: PER_TENSOR, which all of them read; FLATTENED for those whose
            ``update_weights_from_distributed`` takes ``load_format``.
        selector: which of its models take the weights, if it has a draft model.
        checkpoint: the directory its model was started from. With it, names and shapes are checked before the first
            byte; without it, they are not.

    Raises ValueError for an argument that is no use, and for a handle without ``update_weights_from_distributed``.
    """

    def __init__(
        self,
        handle: Any,
        *,
        num_ranks: int = 1,
        name: str | None = None,
        wire_format: WireFormat = WireFormat.PER_TENSOR,
        selector: Selector = "all",
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        arguments.text("name", name, none=True)
        if not hasattr(handle, "update_weights_from_distributed"):
            raise ValueError(f"{handle!r} has no method update_weights_from_distributed")
        super().__init__(
            ActorTransport(handle, name=name or repr(handle)),
            num_ranks=num_ranks,
            wire_format=wire_format,
            selector=selector,
            checkpoint=checkpoint,
        )
