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
