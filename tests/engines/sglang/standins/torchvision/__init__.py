"""Import-only: the names that transformers and SGLang import for image models."""

import enum

from _import_only import HollowModule, hollow_out

__version__ = "0.28.0"
__getattr__ = hollow_out(__name__)


class InterpolationMode(enum.Enum):
    """transformers reads its members when it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


HollowModule.InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
