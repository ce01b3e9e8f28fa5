"""A Ray actor around vLLM's `AsyncLLM`, ready for weight updates.

    engine = ray.remote(VLLMRolloutActor).options(num_gpus=1).remote("path/to/model", max_model_len=4096)
    adapter = VLLMActor(engine)

Its control methods are those of `AsyncLLM`, with plain values in place of vLLM's request classes, so that a caller
needs no vLLM. `VLLMActor` works with any actor that has the same methods.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from async_wsync.engines.vllm.plugin import BACKEND

__all__ = ["VLLMRolloutActor"]


class VLLMRolloutActor:
    """``engine_args`` are those of vLLM's `AsyncEngineArgs`; the weight transfer backend is set here."""

    def __init__(self, model: str, **engine_args: Any) -> None:
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        config = WeightTransferConfig(backend=BACKEND)
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=model, weight_transfer_config=config, **engine_args)
        )
        self._num_requests = 0
        self._processes = _engine_processes()

    async def ready(self) -> bool:
        """True once the model is loaded: the constructor is done."""
        return True

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Generate from token ids; ``sampling`` are keywords of vLLM's `SamplingParams`.

        Returns token_ids, finish_reason ("stop", "length", "abort"), and weight_versions: a list of
        ``{"version", "start", "end"}``, the tokens that each weight version made, as vLLM counts them.
        """
        last: dict[str, Any] = {"token_ids": [], "finish_reason": None, "weight_versions": []}
        async for output in self.stream(prompt_token_ids, sampling):
            last = output
        return last

    async def stream(
        self, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Like `generate`, all there is so far after every step."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(**{"detokenize": False, **(sampling or {})})
        prompt = TokensPrompt(prompt_token_ids=list(prompt_token_ids))
        self._num_requests += 1
        async for output in self._llm.generate(prompt, params, request_id=f"rollout-{self._num_requests}"):
            completion = output.outputs[0]
            spans = getattr(completion, "weight_versions", None) or ()
            yield {
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "weight_versions": [asdict(span) for span in spans],
            }

    # -------------------------------------------------------------------- what `VLLMActor` calls

    async def world_size(self) -> int:
        """Ranks of this engine: tensor x pipeline x data parallel."""
        return int(self._llm.vllm_config.parallel_config.world_size_across_dp)

    async def check_health(self) -> None:
        """Raises if the engine is dead. vLLM itself notices the end of a worker late while it waits for its answer."""
        for process in self._processes:
            if _ended(process):
                raise RuntimeError(f"vLLM's engine is dead: its process {process.pid} has ended")
        await self._llm.check_health()

    async def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        results: list[Any] = await self._llm.collective_rpc(method, args=tuple(args))
        return results

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        await self._llm.pause_generation(mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        await self._llm.resume_generation()

    async def is_paused(self) -> bool:
        return bool(await self._llm.is_paused())

    async def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        return bool(await self._llm.reset_prefix_cache(reset_running_requests))

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def start_weight_update(self) -> None:
        await self._llm.start_weight_update()

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    async def finish_weight_update(self) -> None:
        await self._llm.finish_weight_update()

    async def update_weight_version(self, new_version: str) -> None:
        await self._llm.update_weight_version(new_version)

    async def get_weight_version(self) -> str:
        return str(await self._llm.get_weight_version())

    async def shutdown(self) -> None:
        """Stop vLLM's processes."""
        self._llm.shutdown()


def _engine_processes() -> list[Any]:
    """vLLM's processes under this one; those that it has given no title can't be told from others."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            titled = any("VLLM::" in word for word in process.cmdline())
        except psutil.Error:
            continue
        if titled:
            found.append(process)
    return found


def _ended(process: Any) -> bool:
    import psutil

    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
