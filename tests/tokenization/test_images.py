"""Names and sizes of images, against what vLLM's own functions made of the same data URLs."""

import base64
import io
import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tokenization import images
from tokenization.errors import TokenizationError
from tokenization.images import Algorithm, ImageReader, Placed, Unreadable
from tokenization.vision_grid import VisionGrid, vision_grid

ROOT = Path(__file__).parents[2]
VECTORS = json.loads((ROOT / "tests" / "data" / "image_vectors.json").read_text())
MODEL: str = VECTORS["model"]
URLS: dict[str, str] = {image["name"]: image["url"] for image in VECTORS["images"]}
READ_ELSEWHERE = {"ico", "avif", "ppm"}
"""Formats that engines read and the router does not."""


def png(width: int = 64, height: int = 48, colour: int = 0) -> bytes:
    with io.BytesIO() as buffer:
        Image.new("RGB", (width, height), (colour, 90, 30)).save(buffer, "PNG")
        return buffer.getvalue()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def reader(processor: str = "qwen2_5_vl", algorithm: Algorithm = "blake3") -> ImageReader:
    numbers = {"image_processor_type": "Qwen2VLImageProcessor", **VECTORS["processors"][processor]}
    grid = vision_grid("qwen2_5_vl", numbers)
    assert grid is not None
    return ImageReader(grid, algorithm)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("no comma", "no comma"),
        ("line breaks", "not valid base64"),
        ("blank in front", "not valid base64"),
        ("no padding", "not valid base64"),
        ("url-safe alphabet", "not valid base64"),
        ("no ASCII", "not ASCII"),
        ("png 1x201", "aspect ratio"),
    ],
)
def test_what_the_engine_answers_with_400_is_refused(name: str, what: str) -> None:
    with pytest.raises(TokenizationError, match=what) as failure:
        reader().place(URLS[name], None, MODEL)
    assert (failure.value.status, failure.value.reason) == (400, "image_refused")


@pytest.mark.parametrize("url", ["https://example.com/a.png", "file:///etc/passwd", "blob:1", "x"])
def test_what_is_behind_a_url_is_left_to_the_engine(url: str) -> None:
    place = reader().place(url, None, MODEL)
    assert isinstance(place, Unreadable)
    assert place.reason == "image_url"


@pytest.mark.parametrize(
    "name", ["text", "nothing", "no base64", "png cut in its header", "jpeg cut in its header", *READ_ELSEWHERE]
)
def test_what_cannot_be_read_here_is_left_to_the_engine(name: str) -> None:
    place = reader().place(URLS[name], None, MODEL)
    assert isinstance(place, Unreadable)
    assert place.reason == "image_data"


def test_without_the_engines_model_only_images_with_a_uuid_have_names() -> None:
    place = reader().place(URLS["gif"], None, None)
    assert isinstance(place, Unreadable)
    assert place.reason == "image_model"
    assert reader().place(URLS["gif"], "a cat", None) == Placed("a cat", 6)


def test_an_image_that_is_too_large_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    data = png()
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", len(data) - 1)
    assert "the limit is" in getattr(reader().place(url_of(data), None, MODEL), "detail", "")


def test_a_decompression_bomb_is_never_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    def bomb(side: int) -> str:
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        pixels = chunk(b"IDAT", zlib.compress(bytes(1_000_000)))
        return url_of(b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"iTXt", b"a\0\0\0\0\0b") + chunk(b"IEND", b""))

    def loaded(*_: object) -> None:
        pytest.fail("pixels were decoded")

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", loaded)
    assert isinstance(reader().place(bomb(8000), None, MODEL), Placed)
    assert isinstance(reader().place(bomb(60_000), None, MODEL), Unreadable)


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"\xff\xd8", b"\xff\xe3\x00\x02"),
        (b"\xff\xd8", b"\xff"),
        (b"GIF89a\x01\x00\x01\x00\x00\x00\x00", b"!\xfe\x01a\x00"),
        (b"GIF89a\x01\x00\x01\x00\x00\x00\x00", b"\x00"),
        (b"\x89PNG\r\n\x1a\n", struct.pack(">I", 0) + b"teSt" + struct.pack(">I", zlib.crc32(b"teSt"))),
    ],
)
def test_a_header_of_endless_pieces_is_given_up(start: bytes, piece: bytes) -> None:
    place = reader().place(url_of(start + piece * 300_000), None, MODEL)
    assert isinstance(place, Unreadable)
    assert "more than 20000 pieces" in place.detail


@pytest.mark.parametrize("processor", VECTORS["processors"])
@pytest.mark.parametrize("algorithm", ["blake3", "sha256", "sha512"])
def test_images_have_the_engines_names_and_numbers_of_tokens(processor: str, algorithm: Algorithm) -> None:
    compared = 0
    for image in VECTORS["images"]:
        if "error" in image or isinstance(image["tokens"][processor], dict) or image["name"] in READ_ELSEWHERE:
            continue
        place = reader(processor, algorithm).place(image["url"], None, MODEL)
        assert place == Placed(image["identifiers"][algorithm], image["tokens"][processor]), image["name"]
        compared += 1
    assert compared > 60


def test_a_uuid_is_the_name_and_the_size_is_still_the_images() -> None:
    assert reader().place(URLS["png 27x29"], "mine", MODEL) == Placed("mine", 6)


def test_an_image_without_data_is_the_one_that_came_with_its_uuid() -> None:
    mine = reader()
    for url in (None, "https://example.com/a.png"):
        assert isinstance(mine.place(url, "box", MODEL), Unreadable)
    mine.place(URLS["png 27x29"], "box", MODEL)
    for url in (None, "https://example.com/a.png"):
        assert mine.place(url, "box", MODEL) == Placed("box", 6)
    assert isinstance(mine.place(None, "another", MODEL), Unreadable)
    assert mine.place(URLS["gif"], "box", MODEL) == Placed("box", 6), "the first one decides"
    assert mine.place(URLS["png 1920x1080"], "box", MODEL) == Placed("box", 6)


def test_the_engines_model_is_part_of_the_name() -> None:
    one, two = (reader().place(URLS["gif"], None, model) for model in ("a", "b"))
    assert isinstance(one, Placed)
    assert isinstance(two, Placed)
    assert one.identifier != two.identifier


def test_an_image_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, hashed = reader(), []
    monkeypatch.setattr(images, "identifier", lambda *_, **options: hashed.append(options) or "00")
    broken = url_of(b"nothing")
    for _ in range(3):
        mine.place(URLS["gif"], None, MODEL)
        mine.place(URLS["gif"], "named", MODEL)
        mine.place(broken, None, MODEL)
    assert len(hashed) == 1
    assert mine.counts == {"read": 1, "unreadable": 1, "known": 7}


def test_broken_metadata_warns_nobody() -> None:
    """In a process of its own: pytest has filters for warnings itself."""
    program = """if True:
        import base64, sys
        from tokenization.images import ImageReader
        from tokenization.vision_grid import VisionGrid
        whole = base64.b64decode(sys.argv[1])
        for length in range(8, len(whole), 7):
            cut = base64.b64encode(whole[:length]).decode()
            ImageReader(VisionGrid()).place(f"data:image/tiff;base64,{cut}", None, "m")
    """
    command = [sys.executable, "-W", "default", "-c", program, URLS["tiff turned"].partition(",")[2]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_remembered_is_bounded_and_the_least_recently_used_goes_first() -> None:
    mine = ImageReader(VisionGrid(), max_remembered=2)
    one, two, three = (url_of(png(colour=colour)) for colour in (1, 2, 3))
    for url in (one, two, one, three, one, two):
        mine.place(url, None, MODEL)
    assert mine.counts == {"read": 4, "known": 2}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_images_never_raise_anything_but_a_refusal(data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(name for name in URLS if name.split(" ")[0] in _KINDS)))
    content = bytearray(base64.b64decode(URLS[name].partition(",")[2] + "=="))
    for _ in range(data.draw(st.integers(1, 6))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    try:
        found: object = reader().place(url_of(bytes(content)), None, MODEL)
    except TokenizationError as error:
        found = error.status
    assert found == 400 or isinstance(found, Placed | Unreadable)


_KINDS = {"png", "jpeg", "webp", "gif", "bmp", "tiff", "mpo"}
