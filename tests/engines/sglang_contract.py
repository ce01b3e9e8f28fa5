"""Run with the server's Python: does each payload fit SGLang's own request class? Reads and prints JSON.

In: ``[[class name, payload], ...]``. Out: for each, null or what is wrong with it.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def complaint(cls: Any, payload: dict[str, Any]) -> str | None:
    import msgspec

    unknown = set(payload) - set(cls.__struct_fields__)
    if unknown:
        return f"{cls.__name__} has no {sorted(unknown)}"
    try:
        msgspec.convert(payload, cls)
    except msgspec.ValidationError as error:
        return f"{cls.__name__}: {error}"
    return None


def main() -> None:
    from sglang.srt.managers import io_struct

    asked = json.load(sys.stdin)
    print(json.dumps([complaint(getattr(io_struct, name), payload) for name, payload in asked]))


if __name__ == "__main__":
    main()
