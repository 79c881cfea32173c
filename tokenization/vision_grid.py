"""How many tokens an image becomes in the Qwen-VL family: sizes in, a number out.

The image processor (`Qwen2VLImageProcessor` and its `Fast` form; transformers 5.19 with vLLM 0.32) scales an image so that
both sides are multiples of `patch * merge` pixels and the area lies between two bounds, the aspect ratio kept as well as it
goes; cuts it into patches; and the model merges `merge * merge` of them into one token. Qwen2-VL, Qwen2.5-VL, Qwen3-VL and
Qwen3.5 differ in the numbers only, which are in the model's directory.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

MODEL_TYPES = frozenset(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"))
"""`model_type` of config.json. Other models use the same image processor with placeholders of their own."""
PROCESSORS = frozenset(("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"))

MAX_ASPECT_RATIO = 200
_DEFAULT_PATCH, _DEFAULT_MERGE = 14, 2
_DEFAULT_MIN_PIXELS, _DEFAULT_MAX_PIXELS = 56 * 56, 28 * 28 * 1280
"""What the processor uses where the model's files do not say."""


class VisionGrid(msgspec.Struct, frozen=True, kw_only=True):
    """One model's numbers; pixels."""

    patch: int = _DEFAULT_PATCH
    merge: int = _DEFAULT_MERGE
    min_pixels: int = _DEFAULT_MIN_PIXELS
    max_pixels: int = _DEFAULT_MAX_PIXELS

    def tokens(self, width: int, height: int) -> int:
        """Placeholder tokens of an image. Raises `ValueError` where the processor refuses its aspect ratio."""
        factor = self.patch * self.merge
        wide, high = scaled(width, height, factor, self.min_pixels, self.max_pixels)
        return (wide // factor) * (high // factor)


def scaled(width: int, height: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Width and height after scaling: multiples of `factor` with an area between the bounds, where rounding allows it.
    Raises `ValueError` for an aspect ratio above 200."""
    if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
        raise ValueError(f"an image of {width} x {height} pixels has an aspect ratio above {MAX_ASPECT_RATIO}")
    wide, high = round(width / factor) * factor, round(height / factor) * factor
    if wide * high > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
        high = max(factor, math.floor(height / shrink / factor) * factor)
    elif wide * high < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        wide = math.ceil(width * grow / factor) * factor
        high = math.ceil(height * grow / factor) * factor
    return wide, high


def vision_grid(
    model_type: str | None,
    processor: Mapping[str, Any],
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> VisionGrid | None:
    """The numbers of a model, from config.json's `model_type` and the image processor's configuration; None where the model
    is not of this family. `min_pixels` and `max_pixels`: the engine's `--mm-processor-kwargs`, which win. Raises `ValueError`
    for numbers that are none."""
    kind = processor.get("image_processor_type") or processor.get("feature_extractor_type")
    if model_type not in MODEL_TYPES or kind not in PROCESSORS or processor.get("do_resize") is False:
        return None
    size = processor.get("size") or {}
    numbers = {
        "patch_size": processor.get("patch_size", _DEFAULT_PATCH),
        "merge_size": processor.get("merge_size", _DEFAULT_MERGE),
        "min_pixels": _first(min_pixels, processor.get("min_pixels"), size.get("shortest_edge"), _DEFAULT_MIN_PIXELS),
        "max_pixels": _first(max_pixels, processor.get("max_pixels"), size.get("longest_edge"), _DEFAULT_MAX_PIXELS),
    }
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"preprocessor_config.json: {name} must be a positive integer, not {value!r}")
    return VisionGrid(
        patch=numbers["patch_size"],
        merge=numbers["merge_size"],
        min_pixels=numbers["min_pixels"],
        max_pixels=numbers["max_pixels"],
    )


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
