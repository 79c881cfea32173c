"""Placeholder tokens of images of every size, against the image processor of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenization.vision_grid import VisionGrid, scaled, vision_grid

VECTORS = json.loads((Path(__file__).parent.parent / "data" / "image_vectors.json").read_text())
QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}


@pytest.mark.parametrize("value", [0, -1, 2.5, "14", True])
def test_a_number_that_is_none_is_an_error_that_names_it(value: Any) -> None:
    with pytest.raises(ValueError, match=r"preprocessor_config\.json: patch_size.*positive integer"):
        vision_grid("qwen2_vl", {**QWEN, "patch_size": value})


@pytest.mark.parametrize(
    ("model_type", "processor"),
    [
        ("llava", QWEN),
        (None, QWEN),
        ("qwen2_vl", {}),
        ("qwen2_vl", {**QWEN, "image_processor_type": "CLIPImageProcessor"}),
        ("qwen2_vl", {**QWEN, "do_resize": False}),
    ],
)
def test_what_is_not_of_the_family_has_no_grid(model_type: str | None, processor: dict[str, Any]) -> None:
    assert vision_grid(model_type, processor) is None


def test_an_aspect_ratio_above_200_is_refused() -> None:
    with pytest.raises(ValueError, match="1 x 201 pixels has an aspect ratio above 200"):
        VisionGrid().tokens(1, 201)


def test_bounds_are_read_in_both_notations_and_the_engines_own_win() -> None:
    size = {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
    assert vision_grid("qwen3_vl", {**QWEN, **size}) == VisionGrid(min_pixels=65_536, max_pixels=16_777_216)
    assert vision_grid("qwen3_vl", {**QWEN, **size, "max_pixels": 9000}) == VisionGrid(
        min_pixels=65_536, max_pixels=9000
    )
    assert vision_grid("qwen3_vl", {**QWEN, **size}, min_pixels=1, max_pixels=2) == VisionGrid(
        min_pixels=1, max_pixels=2
    )
    assert vision_grid("qwen2_vl", {"image_processor_type": "Qwen2VLImageProcessorFast"}) == VisionGrid()


def test_sizes_are_scaled_as_transformers_scales_them() -> None:
    for case in VECTORS["resized"]:
        size = case["width"], case["height"], case["factor"], case["min"], case["max"]
        if isinstance(case["to"], dict):
            with pytest.raises(ValueError, match="aspect ratio"):
                scaled(*size)
        else:
            assert list(scaled(*size)) == case["to"][::-1], case


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_a_scaled_image_is_whole_tokens_within_the_bound(width: int, height: int) -> None:
    grid = VisionGrid(max_pixels=1_003_520)
    if max(width, height) > 200 * min(width, height):
        return
    wide, high = scaled(width, height, 28, grid.min_pixels, grid.max_pixels)
    assert wide % 28 == high % 28 == 0
    # The shorter side never falls below one token, whatever that does to the area.
    assert wide * high <= grid.max_pixels or 28 in (wide, high)
    assert grid.tokens(width, height) * 28 * 28 == wide * high
