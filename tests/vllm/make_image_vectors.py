"""Run by the engine's Python: what vLLM makes of images, written down for the ordinary tests.

    python make_image_vectors.py TARGET         writes TARGET (tests/data/image_vectors.json)

Every image is given as a client would, as a `data:` URL. It is loaded by vLLM's media connector, identified by its
processor inputs, and counted by the image processor of transformers in the configurations that the Qwen-VL models ship.
Needs torchvision beside vLLM.
"""

import base64
import io
import json
import random
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import PIL
import vllm
from PIL import Image
from transformers import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from vllm.multimodal.media.connector import MediaConnector
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs

MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
ALGORITHMS = ("blake3", "sha256", "sha512")
PROCESSORS = {
    "qwen2_5_vl": {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12_845_056},
    "qwen3_vl": {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
    "few_pixels": {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 50_176},
}
ORIENTATION = 0x0112


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Colours that differ from place to place, in few compressed bytes."""
    image = Image.new("RGB", (width, height), (200, 30, 90))
    image.paste((10, 120, 240), (0, 0, max(1, width // 2), max(1, height // 3)))
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.linear_gradient("L").resize((width, height)))
    return image.convert(mode)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    with io.BytesIO() as buffer:
        image.save(buffer, kind, **options)
        return buffer.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def xmp(orientation: int) -> bytes:
    return (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="%d"/></rdf:RDF></x:xmpmeta>'
        % orientation
    )


def with_chunk(png: bytes, kind: bytes, data: bytes, before: bytes) -> bytes:
    """A PNG with one more chunk, in front of the first one of the type `before`."""
    chunk = struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    at = png.index(before) - 4
    return png[:at] + chunk + png[at:]


def images() -> Iterator[tuple[str, bytes]]:
    for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"):
        yield f"png {mode}", saved(picture(61, 43, mode if mode != "I;16" else "L").convert(mode), "PNG")
    yield "png P transparent", saved(picture(61, 43, "P"), "PNG", transparency=0)
    yield "png RGB transparent colour", saved(picture(61, 43), "PNG", transparency=(200, 30, 90))
    yield "png exif", saved(picture(160, 60), "PNG", exif=turned(6))
    exif = turned(8).tobytes().removeprefix(b"Exif\0\0")
    yield "png exif behind the pixels", with_chunk(saved(picture(160, 60), "PNG"), b"eXIf", exif, b"IEND")
    text = b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(6)
    yield "png xmp", with_chunk(saved(picture(160, 60), "PNG"), b"iTXt", text, b"IDAT")
    yield "png xmp behind the pixels", with_chunk(saved(picture(160, 60), "PNG"), b"iTXt", text, b"IEND")
    yield (
        "png animated",
        saved(picture(70, 50), "PNG", save_all=True, append_images=[picture(70, 50, "L").convert("RGB")]),
    )
    for mode in ("RGB", "L", "CMYK"):
        yield f"jpeg {mode}", saved(picture(75, 41, mode), "JPEG", quality=30)
    yield "jpeg progressive", saved(picture(75, 41), "JPEG", quality=30, progressive=True)
    for orientation in range(1, 9):
        yield f"jpeg exif {orientation}", saved(picture(160, 60), "JPEG", quality=10, exif=turned(orientation))
    yield "jpeg exif 9", saved(picture(160, 60), "JPEG", quality=10, exif=turned(9))
    yield "jpeg broken exif", saved(picture(160, 60), "JPEG", quality=10, exif=b"Exif\0\0nonsense")
    yield "jpeg xmp", saved(picture(160, 60), "JPEG", quality=10, xmp=xmp(8))
    yield "mpo", saved(picture(160, 60), "MPO", quality=10, save_all=True, append_images=[picture(80, 30)])
    yield "webp", saved(picture(90, 44), "WEBP", quality=20)
    yield "webp RGBA", saved(picture(90, 44, "RGBA"), "WEBP", lossless=True)
    yield "webp exif", saved(picture(160, 60), "WEBP", quality=20, exif=turned(6))
    yield (
        "webp animated",
        saved(picture(90, 44), "WEBP", save_all=True, append_images=[picture(90, 44, "L").convert("RGB")]),
    )
    yield "gif", saved(picture(90, 44, "P"), "GIF")
    yield "gif L", saved(picture(90, 44, "L"), "GIF")
    yield "gif transparent", saved(picture(90, 44, "P"), "GIF", transparency=0)
    yield (
        "gif animated",
        saved(picture(90, 44), "GIF", save_all=True, append_images=[picture(90, 44, "L").convert("RGB")]),
    )
    yield "bmp", saved(picture(33, 20), "BMP")
    yield "bmp P", saved(picture(33, 20, "P"), "BMP")
    yield "bmp RGBA", saved(picture(33, 20, "RGBA"), "BMP")
    for mode in ("RGB", "CMYK", "L", "RGBA"):
        yield f"tiff {mode}", saved(picture(66, 35, mode), "TIFF", compression="tiff_lzw")
    yield "tiff turned", saved(picture(160, 60), "TIFF", compression="tiff_lzw", tiffinfo={ORIENTATION: 6})
    yield "ico", saved(picture(64, 64, "RGBA"), "ICO")
    yield "avif", saved(picture(90, 44), "AVIF", quality=20)
    yield "ppm", saved(picture(6, 5), "PPM")
    for width, height in (
        (1, 1),
        (1, 3),
        (3, 1),
        (2, 2),
        (27, 29),
        (1, 200),
        (200, 1),
        (1, 201),
        (4000, 21),
        (1920, 1080),
        (4032, 3024),
    ):
        yield f"png {width}x{height}", saved(Image.new("1", (width, height)), "PNG", optimize=True)
    for width, height in ((28, 28), (42, 42), (70, 98), (640, 480), (3000, 37)):
        yield f"jpeg {width}x{height}", saved(Image.new("L", (width, height)), "JPEG", quality=1)
    png, jpeg = saved(picture(61, 43), "PNG"), saved(picture(75, 41), "JPEG", quality=30)
    yield "png cut short", png[:-40]
    yield "png cut in its header", png[:20]
    yield "jpeg cut short", jpeg[: len(jpeg) * 2 // 3]
    yield "jpeg cut in its header", jpeg[:100]
    yield "text", b"This is not an image."
    yield "nothing", b""


def urls() -> Iterator[tuple[str, str]]:
    for name, data in images():
        kind = name.partition(" ")[0]
        yield name, f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    text = base64.b64encode(saved(picture(31, 17), "PNG")).decode()
    yield "capital letters", f"DATA:image/png;BASE64,{text}"
    yield "capital scheme", f"Data:image/png;base64,{text}"
    yield "no media type", f"data:;base64,{text}"
    yield "wrong media type", f"data:image/jpeg;base64,{text}"
    yield "parameter", f"data:image/png;name=a.png;base64,{text}"
    yield "no base64", "data:image/png,hello"
    yield "no comma", "data:image/png;base64"
    yield "line breaks", f"data:image/png;base64,{text[:40]}\n{text[40:]}"
    yield "blank in front", f"data:image/png;base64, {text}"
    padded = next(
        text for text in (base64.b64encode(saved(picture(w, 17), "PNG")).decode() for w in range(31, 60)) if "=" in text
    )
    yield "padding", f"data:image/png;base64,{padded}"
    yield "no padding", f"data:image/png;base64,{padded.rstrip(chr(61))}"
    yield "more padding", f"data:image/png;base64,{text}="
    yield "url-safe alphabet", f"data:image/png;base64,{text.replace('+', '-').replace('/', '_')}"
    yield "no ASCII", f"data:image/png;base64,ä{text}"


def outcome(act: Callable[[], object]) -> object:
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - what it is, is what is written down
        return {"error": type(error).__name__}


def main(target: Path) -> None:
    processors = {name: Qwen2VLImageProcessor(**settings) for name, settings in PROCESSORS.items()}

    def tokens(media: object, processor: Qwen2VLImageProcessor) -> int:
        grid = processor(images=[media.media], return_tensors="pt")["image_grid_thw"]
        return int(grid.prod()) // processor.merge_size**2

    def identifier(media: object, algorithm: str) -> str:
        items = MultiModalDataParser().parse_mm_data({"image": [media]})
        return ProcessorInputs([], items).get_mm_hashes(MODEL, algorithm)["image"][0]

    def seen(url: str) -> object:
        media = MediaConnector().fetch_image(url)
        return {
            "size": list(media.media.size),
            "identifiers": {name: identifier(media, name) for name in ALGORITHMS},
            "tokens": {name: outcome(lambda p=p: tokens(media, p)) for name, p in processors.items()},
        }

    rng = random.Random(7)
    sizes = [(rng.choice((rng.randrange(1, 60), rng.randrange(1, 5000))), rng.randrange(1, 5000)) for _ in range(150)]
    bounds = [(28, 3136, 12_845_056), (32, 65_536, 16_777_216), (28, 200_704, 1_003_520)]
    result = {
        "note": "written by tests/vllm/make_image_vectors.py",
        "made_with": {"vllm": vllm.__version__, "pillow": PIL.__version__},
        "model": MODEL,
        "processors": PROCESSORS,
        "images": [{"name": name, "url": url, **dict(outcome(lambda u=url: seen(u)))} for name, url in urls()],
        "resized": [
            {
                "height": h,
                "width": w,
                "factor": f,
                "min": low,
                "max": high,
                "to": outcome(lambda a=(h, w, f, low, high): smart_resize(*a)),
            }
            for (h, w), (f, low, high) in ((size, bounds[at % 3]) for at, size in enumerate(sizes))
        ],
    }
    lines = json.dumps(result, indent=None, separators=(",", ":"))
    target.write_text(lines.replace('{"name"', '\n{"name"').replace('{"height"', '\n{"height"') + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
