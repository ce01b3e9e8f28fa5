"""The entry point ``vllm.general_plugins``: makes the backend ``async_wsync`` known in every process of vLLM."""

from __future__ import annotations

__all__ = ["BACKEND", "register"]

BACKEND = "async_wsync"
"""The name to give to vLLM: ``--weight-transfer-config '{"backend": "async_wsync"}'``."""


def register() -> None:
    """Called by vLLM, several times maybe. Loads nothing but vLLM's own registry."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "async_wsync.engines.vllm.worker", "WeightSyncEngine")
    except ValueError:
        pass  # registered already
