"""Engine actors with the methods of miles (today's) and of slime (an older one), each in front of a small server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import ray
import torch

from tests.support.small_sglang import SmallSGLang


class _Front:
    """Their way of talking to their server: post, raise for a status that is an error, return the JSON."""

    def __init__(self, weights: dict[str, torch.Tensor], quirks: dict[str, Any] | None = None) -> None:
        self._server = SmallSGLang(weights=weights, quirks=quirks or {}).__enter__()
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def _post(self, path: str, payload: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self._server.url}/{path}", json.dumps(payload).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{error.code} Client Error: {error.read().decode()}") from None

    def look(self) -> dict[str, Any]:
        server = self._server
        return {
            "weights": server.weights,
            "version": server.version,
            "paused": server.paused,
            "session": server.session,
            "paths": server.paths(),
            "seen": self.seen,
        }

    def forget(self, weights: dict[str, torch.Tensor]) -> None:
        """As new, but for its standing quirks."""
        server = self._server
        server.weights, server.version, server.paused, server.session = weights, "default", None, None
        server.log.clear()
        self.seen = []

    def quirk(self, path: str, answer: Any) -> None:
        self._server.quirks[path] = answer

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> Any:
        return self._post(
            "init_weights_update_group",
            {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": group_name,
                "backend": backend,
            },
        )

    def destroy_weights_update_group(self, group_name: str) -> Any:
        try:
            return self._post("destroy_weights_update_group", {"group_name": group_name})
        except RuntimeError:
            return None  # an engine that was just created has no group

    def flush_cache(self) -> None:
        urllib.request.urlopen(f"{self._server.url}/flush_cache", timeout=10).close()

    def _update(self, names: list[str], dtypes: list[Any], shapes: list[Any], **more: Any) -> Any:
        assert all(isinstance(dtype, torch.dtype) for dtype in dtypes)
        self.seen.append(("update", {"names": names, **more}))
        payload = {
            "names": names,
            "dtypes": [str(dtype).replace("torch.", "") for dtype in dtypes],
            "shapes": shapes,
            **{key: value for key, value in more.items() if value is not None},
        }
        return self._post("update_weights_from_distributed", payload)


@ray.remote(num_cpus=0, max_restarts=1)
class MilesServer(_Front):
    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[torch.dtype],
        shapes: list[Any],
        group_name: str,
        flush_cache: bool = False,
        weight_version: str | None = None,
        selector: str = "all",
    ) -> Any:
        return self._update(
            names,
            dtypes,
            shapes,
            group_name=group_name,
            flush_cache=flush_cache,
            weight_version=weight_version,
            selector=selector,
        )

    def pause_generation(self, mode: str = "retract") -> Any:
        return self._post("pause_generation", {"mode": mode})

    def continue_generation(self) -> Any:
        return self._post("continue_generation", {})

    def begin_weight_update(self, selector: str = "all") -> Any:
        return self._post("begin_weight_update", {"selector": selector})

    def end_weight_update(self) -> Any:
        return self._post("end_weight_update", {})

    def update_weight_version(self, weight_version: str) -> Any:
        return self._post("update_weight_version", {"new_version": weight_version, "abort_all_requests": False})

    def get_weight_version(self) -> str:
        with urllib.request.urlopen(f"{self._server.url}/model_info", timeout=10) as answer:
            return str(json.loads(answer.read())["weight_version"])


@ray.remote(num_cpus=0)
class SlimeServer(_Front):
    """Before sessions and selectors."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        missing = (404, {"detail": "Not Found"})
        quirks = {"/begin_weight_update": missing, "/end_weight_update": missing, "no_sessions": True}
        super().__init__(weights, quirks)

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[torch.dtype],
        shapes: list[Any],
        group_name: str,
        weight_version: str | None = None,
    ) -> Any:
        return self._update(names, dtypes, shapes, group_name=group_name, weight_version=weight_version)

    def pause_generation(self) -> Any:
        return self._post("pause_generation", {"mode": "abort"})

    def continue_generation(self) -> Any:
        return self._post("continue_generation", {})
