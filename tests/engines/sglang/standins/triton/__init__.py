"""Import-only: kernels can be decorated, none can run."""

from typing import Any

from _import_only import Nothing, hollow_out

__version__ = "3.9.0"
__getattr__ = hollow_out(__name__)


class Config(Nothing):
    pass


def cdiv(numerator: int, denominator: int) -> int:
    return -(numerator // -denominator)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def heuristics(*_: Any, **__: Any) -> Any:
    return lambda function: function
