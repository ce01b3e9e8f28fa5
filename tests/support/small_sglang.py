"""A real HTTP server that answers as SGLang 0.5.23 was seen to answer, and really receives over gloo.

It keeps SGLang's traps: unknown names are dropped with 200, the version moves with any bucket that gives one, a second
begin is refused, end and continue wait for a receive that is under way.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist

Reply = tuple[int, Any]


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that gave up


@dataclass
class SmallSGLang:
    """One server in threads of this process. ``quirks`` change what it does; ``log`` has every (path, body)."""

    weights: dict[str, torch.Tensor]
    quirks: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    model_path: str = "relative/model"
    log: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    version: str = "default"
    paused: str | None = None
    session: str | None = None
    seed: int = 7
    groups: dict[str, Any] = field(default_factory=dict)
    scheduler: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> SmallSGLang:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                status, data = owner.answer(self.path, body, self.headers.get("authorization"))
                if status == 0:  # drop the connection, as a server that dies does
                    self.close_connection = True
                    self.connection.close()
                    return
                raw = data.encode() if isinstance(data, str) else json.dumps(data).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST = handle_one

            def log_message(self, *_: Any) -> None:
                pass

        Handler.protocol_version = "HTTP/1.1"
        self._http = _Server(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._http.shutdown()
        self._http.server_close()
        self.groups.clear()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.log]

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for seen, body in self.log if seen == path]

    # ----------------------------------------------------------------------- answers

    def answer(self, path: str, body: dict[str, Any], authorization: str | None) -> Reply:
        self.log.append((path, body))
        if self.api_key is not None and authorization != f"Bearer {self.api_key}":
            return 401, {"error": "Unauthorized"}
        quirk = self.quirks.get(path)
        if isinstance(quirk, list):
            quirk = quirk.pop(0) if quirk else None
        if callable(quirk):
            quirk = quirk()
        if quirk is not None:
            return quirk  # type: ignore[no-any-return]
        method = getattr(self, f"on{path.replace('/', '_')}", None)
        if method is None:
            return 404, {"detail": "Not Found"}
        return method(body)  # type: ignore[no-any-return]

    def on_model_info(self, body: dict[str, Any]) -> Reply:
        return 200, {"model_path": self.model_path, "weight_version": self.version}

    def on_server_info(self, body: dict[str, Any]) -> Reply:
        facts = {"tp_size": 1, "dp_size": 1, "pp_size": 1, "random_seed": self.seed, "version": "0.5.23"}
        return 200, {**facts, "device": "cpu", "speculative_algorithm": None, **self.quirks.get("facts", {})}

    def on_get_weights_by_name(self, body: dict[str, Any]) -> Reply:
        tensor = self.weights.get(body["name"])
        if tensor is None:
            return 400, {"error": {"message": "Get parameter by name failed"}}
        return 200, tensor[: body["truncate_size"]].float().tolist()

    def on_pause_generation(self, body: dict[str, Any]) -> Reply:
        if body["mode"] not in ("abort", "retract", "in_place"):
            return 400, {"message": "literal_error"}
        self.paused = body["mode"]
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def on_continue_generation(self, body: dict[str, Any]) -> Reply:
        with self.scheduler:
            self.paused = None
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def on_flush_cache(self, body: dict[str, Any]) -> Reply:
        if self.paused == "in_place":
            return 400, "Flush cache failed.\n"
        return 200, "Cache flushed.\n"

    def on_begin_weight_update(self, body: dict[str, Any]) -> Reply:
        if self.session is not None:
            return 400, {"success": False, "message": "a weight-update session is already open"}
        self.session = body["selector"]
        return 200, {"success": True, "message": "Success"}

    def on_end_weight_update(self, body: dict[str, Any]) -> Reply:
        with self.scheduler:
            if self.session is None:
                return 400, {"success": False, "message": "no weight-update session is open; call begin first"}
            self.session = None
            return 200, {"success": True, "message": "Success"}

    def on_update_weight_version(self, body: dict[str, Any]) -> Reply:
        self.version = body["new_version"]
        return 200, {"success": True, "message": "ok", "new_version": self.version}

    def on_weights_checker(self, body: dict[str, Any]) -> Reply:
        checksums = {name: str(tensor.double().sum().item()) for name, tensor in self.weights.items()}
        return 200, {"success": True, "message": "Success.", "ranks": [{"checksums": checksums}]}

    # ------------------------------------------------------------------------- group

    def on_init_weights_update_group(self, body: dict[str, Any]) -> Reply:
        name = body["group_name"]
        if name in self.groups:
            return 400, {"success": False, "message": "Failed: The specified group name has already been created"}
        try:
            limit = timedelta(seconds=self.quirks.get("group_timeout", 20.0))
            store = dist.TCPStore(body["master_address"], body["master_port"], is_master=False, timeout=limit)
            # What torch's helper makes of a group of this name.
            inner = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
            self.groups[name] = dist.ProcessGroupGloo(inner, body["rank_offset"], body["world_size"], limit)
        except RuntimeError as error:
            return 400, {"success": False, "message": f"Failed to initialize custom process group: {error}."}
        return 200, {"success": True, "message": "Succeeded to initialize custom process group."}

    def on_destroy_weights_update_group(self, body: dict[str, Any]) -> Reply:
        if self.groups.pop(body["group_name"], None) is None:
            return 400, {"success": False, "message": "The group to be destroyed does not exist."}
        return 200, {"success": True, "message": "Succeeded to destroy custom process group."}

    def on_update_weights_from_distributed(self, body: dict[str, Any]) -> Reply:
        if self.session is None and not self.quirks.get("no_sessions"):
            return 400, {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        with self.scheduler:
            time.sleep(self.quirks.get("slow", 0.0))
            try:
                received = self._receive(body)
            except RuntimeError as error:
                return 400, {"success": False, "message": f"Failed to receive weights: {error}"}
        for name, tensor in received:
            if name in self.weights:  # others are dropped without a word
                self.weights[name] = tensor
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update parameter online."}

    def _receive(self, body: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        group = self.groups[body["group_name"]]
        entries = [
            (name, getattr(torch, dtype), tuple(shape))
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=False)
        ]
        if body.get("load_format") != "flattened_bucket":
            tensors = [(name, torch.empty(shape, dtype=dtype)) for name, dtype, shape in entries]
            for _, tensor in tensors:
                group.broadcast(tensor, 0).wait()
            return tensors
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in entries]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        group.broadcast(flat, 0).wait()
        found, offset = [], 0
        for (name, dtype, shape), size in zip(entries, sizes, strict=True):
            if offset % dtype.itemsize:
                raise RuntimeError(f"Unaligned received tensor {name}")
            found.append((name, flat[offset : offset + size].view(dtype).reshape(shape)))
            offset += size
        return found
