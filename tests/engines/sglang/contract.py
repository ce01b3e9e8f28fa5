"""Run with the server's Python: does each payload fit SGLang's own request class? Reads and prints JSON.

In: ``[[class name, payload], ...]``. Out: for each, null or what is wrong with it.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def complaint(cls: Any, payload: dict[str, Any]) -> str | None:
    import msgspec

    # Field by field: between its own processes SGLang sends these classes as arrays.
    fields = {field.name: field for field in msgspec.structs.fields(cls)}
    if unknown := set(payload) - set(fields):
        return f"{cls.__name__} has no {sorted(unknown)}"
    if missing := {name for name, field in fields.items() if field.required} - set(payload):
        return f"{cls.__name__} needs {sorted(missing)}"
    for name, value in payload.items():
        try:
            msgspec.convert(value, fields[name].type)
        except msgspec.ValidationError as error:
            return f"{cls.__name__}.{name}: {error}"
    return None


def main() -> None:
    from sglang.srt.managers import io_struct

    asked = json.load(sys.stdin)
    print(json.dumps([complaint(getattr(io_struct, name), payload) for name, payload in asked]))


if __name__ == "__main__":
    main()
