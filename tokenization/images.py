"""The name under which an engine hashes an image into its blocks, and how many tokens the image becomes.

The rule is vLLM 0.32's (`multimodal/hasher.py`, `processing/inputs.py`, `media/connector.py`, `media/image.py`):

- A `uuid` that the client gives with the image is the name as it is, and the first image under it decides over the tokens of all
  later ones, which may come without data (while the engine remembers it: 4 GiB unless told otherwise).
- Else the name is the digest (`--mm-hasher-algorithm`, BLAKE3 unless told otherwise; no environment variable changes it) of a
  framed record: the image's *encoded bytes* as they came (not its pixels), and the model as the engine was started with it
  (`--model`, after Hugging Face's offline mode has replaced it by a path). Where the decoded image is not RGB the engine
  converts it, and what it converts to (mode, background of transparent pixels) goes into the record too.
- `mm_processor_kwargs` and `media_io_kwargs` of the request, and `--media-io-kwargs`, would go into the record, and into the
  name beside a `uuid`. The first two change the number of tokens as well. Requests with them are left to the engine.
- The size that decides over the number of tokens is the decoded image's, after EXIF or XMP orientation was applied.
- LoRA adapters change the name only with `--enable-tower-connector-lora`.

So nothing has to be decompressed: the header tells size and mode. What the engine answers with 400 whatever image it is
(base64 that is none, an aspect ratio above 200) is refused here. An image that cannot be read here is left to the engine,
which may know its format; one whose pixels turn out to be broken gets a name here and a 400 from the engine.

What a client gave once is remembered under a digest of its URL: later turns of the conversation cost that digest.
"""

import binascii
import hashlib
import io
import logging
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
import numpy as np
import xxhash
from blake3 import blake3
from PIL import Image, ImageOps

from tokenization.errors import refuse
from tokenization.vision_grid import VisionGrid

log = logging.getLogger(__name__)

Algorithm = Literal["blake3", "sha256", "sha512"]
Reason = Literal["image_url", "image_data", "image_model", "image_options", "media"]
"""Why an image or the like is left to the engine; values of a metric's label."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats whose header tells size and mode as the decoder will. Engines read some more (AVIF, ICO, ...)."""
MAX_IMAGE_BYTES = 32 * 1024 * 1024
"""Encoded; more would keep a worker thread busy with hashing for most of a second."""
MAX_IMAGE_PIXELS = 178_956_970
"""The engine's own limit (VLLM_MAX_IMAGE_PIXELS)."""
MAX_HEADER_READS = 20_000
"""Pieces of a header. Ordinary images have less than a thousand; 32 MiB in pieces of four bytes would be half a minute of
Python."""
MAX_REMEMBERED = 65_536
"""Images, and images by their uuid; each takes about 400 bytes."""

# Pillow tells of broken metadata by warnings whose texts have numbers from the image in them. Python keeps every text that it has
# warned with; the reader's own log line is enough.
warnings.filterwarnings("ignore", module=r"PIL\.")

_PNG = b"\x89PNG\r\n\x1a\n"
_PIXEL_CHUNKS = frozenset((b"IDAT", b"fdAT", b"IEND"))
_CONVERTED_TO = {"image_mode": "RGB", "rgba_background_color": (255, 255, 255)}


class Placed(msgspec.Struct, frozen=True):
    """An image that is known here."""

    identifier: str
    tokens: int


class Unreadable(msgspec.Struct, frozen=True):
    """An image that only the engine knows."""

    reason: Reason
    detail: str


class Header(msgspec.Struct, frozen=True):
    """What an image's header says; pixels, orientation applied."""

    width: int
    height: int
    converted: bool
    """Whether the engine converts it to RGB."""


class ImageReader:
    """Names and sizes of one model's images. Thread-safe and blocking: a new image costs its hashing."""

    def __init__(self, grid: VisionGrid, algorithm: Algorithm = "blake3", max_remembered: int = MAX_REMEMBERED) -> None:
        self.grid = grid
        self._algorithm = algorithm
        self._max_remembered = max_remembered
        self._known: OrderedDict[tuple[bytes, str], Placed | Unreadable] = OrderedDict()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        """known, read, unreadable: images, since start."""

    def place(self, url: str | None, uuid: str | None, engine_model: str | None) -> Placed | Unreadable:
        """What the engine that was started with `--model engine_model` makes of an image. Raises `TokenizationError` (400) for
        what the engine refuses."""
        # An engine, too, goes by the first image that came under a name, whatever comes later or is left out.
        if uuid is not None and (named := self._recall((b"", uuid))) is not None:
            return named
        if url is None:
            return Unreadable("media", "an image without data, whose uuid has not been seen")
        if url[:5].lower() != "data:":
            return Unreadable("image_url", "the image is behind a URL that the router does not fetch")
        if engine_model is None and uuid is None:
            return Unreadable("image_model", "no engine has said what --model it was started with")
        try:
            name = (xxhash.xxh3_128_digest(url.encode("ascii")), engine_model or "")
        except UnicodeEncodeError as error:
            raise refuse("the image's data URL is not ASCII", "image_refused") from error
        if (known := self._recall(name)) is None:
            known = self._read(url, engine_model or "")
            self.counts["read" if isinstance(known, Placed) else "unreadable"] += 1
            self._remember(name, known)
        if uuid is None or isinstance(known, Unreadable):
            return known
        own = Placed(uuid, known.tokens)
        self._remember((b"", uuid), own)
        return own

    def _recall(self, name: tuple[bytes, str]) -> Placed | Unreadable | None:
        with self._lock:
            if (known := self._known.get(name)) is not None:
                self._known.move_to_end(name)
                self.counts["known"] += 1
            return known

    def _remember(self, name: tuple[bytes, str], what: Placed | Unreadable) -> None:
        with self._lock:
            self._known[name] = what
            self._known.move_to_end(name)
            while len(self._known) > self._max_remembered:
                self._known.popitem(last=False)

    def _read(self, url: str, engine_model: str) -> Placed | Unreadable:
        data = data_of(url)
        if data is None:
            return Unreadable("image_data", "the image's data URL is not base64")
        if len(data) > MAX_IMAGE_BYTES:
            return Unreadable("image_data", f"the image has {len(data)} bytes; the limit is {MAX_IMAGE_BYTES}")
        try:
            header = header_of(data)
        except Exception as error:  # noqa: BLE001 - whatever a decoder makes of bytes from outside; counted as image_data
            log.info("image_unreadable bytes=%d error=%r", len(data), error)
            return Unreadable("image_data", f"the image cannot be read here: {error!r}")
        if header.width * header.height > MAX_IMAGE_PIXELS:
            return Unreadable("image_data", f"the image has {header.width} x {header.height} pixels")
        try:
            tokens = self.grid.tokens(header.width, header.height)
        except ValueError as error:
            raise refuse(str(error), "image_refused") from error
        return Placed(identifier(data, engine_model, converted=header.converted, algorithm=self._algorithm), tokens)


def data_of(url: str) -> bytes | None:
    """The bytes in a base64 `data:` URL; None where it says that it is none (the engine answers 501). Raises
    `TokenizationError` (400) where the engine cannot read it."""
    spec, comma, text = url[5:].partition(",")
    if not comma:
        raise refuse("the image's data URL has no comma", "image_refused")
    # The engine looks for the word in small letters.
    if spec.rpartition(";")[1:] != (";", "base64"):
        return None
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error as error:
        raise refuse(f"the image's data URL is not valid base64: {error}", "image_refused") from error


def header_of(data: bytes) -> Header:
    """Size and mode of an encoded image, without decompressing it. Raises whatever Pillow does for what is none."""
    with Image.open(_Header(_metadata_first(data)), formats=FORMATS) as image:
        width, height = image.size
        # A TIFF's header tells the size after orientation.
        if image.format != "TIFF" and _turned(image):
            width, height = height, width
        return Header(width, height, image.mode != "RGB")


def identifier(data: bytes, engine_model: str, *, converted: bool, algorithm: Algorithm = "blake3") -> str:
    """The engine's name for an image, in hexadecimal digits."""
    content = {"io_config": _CONVERTED_TO, "data": data} if converted else data
    image = b"".join((*_field(b"image"), b"\x03", *_field(b"image"), *_value(content)))
    record = b"".join((image, *_field(b"model_id"), *_value(engine_model)))
    return blake3(record).hexdigest() if algorithm == "blake3" else hashlib.new(algorithm, record).hexdigest()


def _field(data: bytes) -> tuple[bytes, bytes]:
    return len(data).to_bytes(8, "little"), data


def _value(value: object) -> Iterable[bytes]:
    """The engine's framing: a tag per kind, a length in front of everything."""
    match value:
        case Mapping():
            yield b"\x02" + len(value).to_bytes(8, "little")
            for name, item in value.items():
                yield from _field(str(name).encode())
                yield from _value(item)
        case tuple():
            yield b"\x01" + len(value).to_bytes(8, "little")
            for item in value:
                yield from _value(item)
        case str():
            yield from (b"\x03", *_field(value.encode()))
        case bytes():
            yield from (b"\x03", *_field(value))
        case _:
            yield from (b"\x03", *_field(np.array(value, dtype=np.int64).tobytes()))


class _Header(io.BytesIO):
    """A file of which only so many pieces are read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        if self._reads > MAX_HEADER_READS:
            raise _endless()
        return super().read(size)


def _endless() -> ValueError:
    return ValueError(f"the header has more than {MAX_HEADER_READS} pieces")


def _turned(image: Image.Image) -> bool:
    """Whether orientation swaps the sides. Pillow itself turns a stand-in that has the image's metadata: it leaves an image
    alone whose metadata it cannot write back, and only it knows when that is."""
    stand_in = Image.new("1", (1, 2))
    stand_in.info = dict(image.info)
    try:
        return ImageOps.exif_transpose(stand_in).size == (2, 1)
    except Exception:  # noqa: BLE001 - broken metadata; the engine goes on without it
        return False


def _metadata_first(data: bytes) -> bytes:
    """A PNG's metadata may follow its pixels, which the decoder would have to inflate to get there: the same file with
    nothing but metadata in front of the first pixels. Other formats as they are."""
    if not data.startswith(_PNG):
        return data
    view, at, kept, pixels, pieces = memoryview(data), len(_PNG), [_PNG], b"", 0
    while at + 12 <= len(data):
        if (pieces := pieces + 1) > MAX_HEADER_READS:
            raise _endless()
        end = at + 12 + int.from_bytes(view[at : at + 4])
        kind = bytes(view[at + 4 : at + 8])
        if kind in _PIXEL_CHUNKS:
            pixels = pixels or bytes(view[at : at + 8])
        else:
            kept.append(bytes(view[at:end]))
        at = end
    return b"".join((*kept, pixels))
