"""Import-only: every kernel can be imported, and says so when it is called."""

import datetime
import os
from typing import Any

import torch.distributed.distributed_c10d as c10d

if _seconds := os.environ.get("SGLANG_STANDIN_GROUP_TIMEOUT"):
    # The server's update groups take this default: there is no way to pass a timeout to it.
    c10d.default_pg_timeout = datetime.timedelta(seconds=float(_seconds))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in")

    return kernel


def _without_pinning(make: Any) -> Any:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return made


if os.environ.get("SGLANG_STANDIN_UNPINNED"):
    # SGLang's LoRA code pins host memory, which a machine without a GPU can't. Pinned or not, the values are the same.
    import torch

    for _name in ("tensor", "empty", "zeros", "ones", "arange", "full", "empty_like", "zeros_like", "ones_like"):
        setattr(torch, _name, _without_pinning(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
