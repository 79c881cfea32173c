"""A chat with images and the like: which of them are known here, and the text up to the first that is not."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tokenization.conversation import Conversation, Media
from tokenization.images import Algorithm, ImageReader, Placed, Unreadable
from tokenization.model_files import ModelFiles
from tokenization.vision_grid import vision_grid

IMAGE_TOKEN = "<|image_pad|>"
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
"""What vLLM 0.32 puts into a plain string for an image (Qwen-VL family)."""

Render = Callable[[list[dict[str, Any]]], str]
"""Messages to the prompt's text."""


class ImageRules(msgspec.Struct, frozen=True):
    """What is known of one model's images."""

    reader: ImageReader
    token: str
    """The text of the placeholder."""


class KnownMedia(msgspec.Struct, frozen=True):
    """The images before the first medium that only the engine knows."""

    images: tuple[Placed, ...]
    stop: tuple[Media, Unreadable] | None = None
    """That medium, and why; None where everything is known."""


def image_rules(
    files: ModelFiles, algorithm: Algorithm, min_pixels: int | None, max_pixels: int | None
) -> ImageRules | None:
    """None where the model takes no images, or takes them in a way that is not known here."""
    grid = vision_grid(files.model_type, files.image_processor, min_pixels=min_pixels, max_pixels=max_pixels)
    if grid is None:
        return None
    return ImageRules(ImageReader(grid, algorithm), files.special_tokens.get("image_token", IMAGE_TOKEN))


def read_media(
    media: Sequence[Media], rules: ImageRules | None, engine_model: str | None, *, options: bool
) -> KnownMedia:
    """Reads images up to the first medium that cannot be read here. `options`: the request changes how the engine reads them.
    Raises `TokenizationError` (400) for what the engine refuses."""
    images: list[Placed] = []
    for one in media:
        found = _read(one, rules, engine_model, options=options)
        if isinstance(found, Unreadable):
            return KnownMedia(tuple(images), (one, found))
        images.append(found)
    return KnownMedia(tuple(images))


def _read(one: Media, rules: ImageRules | None, engine_model: str | None, *, options: bool) -> Placed | Unreadable:
    if one.modality != "image" or (one.url is None and one.uuid is None):
        return Unreadable("media", f"{one.modality} without a URL of an image")
    if rules is None:
        return Unreadable("image_model", "how this model takes images is not known here")
    if options:
        return Unreadable("image_options", "the request sets mm_processor_kwargs or media_io_kwargs")
    return rules.reader.place(one.url, one.uuid, engine_model)


def text_before(stop: Media, talk: Conversation, render: Render, cut_token: str | None) -> str:
    """The whole turns of the prompt before a medium; empty where there are none.

    The place is found by rendering twice with different texts in it: as far as both renderings agree they do not depend on
    it, and whole turns before that place have the same ids as in the engine's prompt.
    """
    texts = []
    for stand_in in ("0", "1"):
        message = dict(talk.messages[stop.message])
        content = message["content"]
        if isinstance(content, list):
            message["content"] = [*content[: stop.part], {"type": "text", "text": stand_in}]
        else:
            message["content"] = stand_in
        texts.append(render([*talk.messages[: stop.message], message, *talk.messages[stop.message + 1 :]]))
    end = next((at for at, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    cut = texts[0].rfind(cut_token, 0, end) if cut_token else -1
    return texts[0][: max(0, cut)]
