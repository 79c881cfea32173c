"""Chats with images through the tokenizer of a Qwen-VL model: ids, names, and what a turn costs."""

import base64
import io
from typing import Any

import pytest
from PIL import Image

from indexer.block_key import block_keys, media_extras, root_key
from tokenization import images
from tokenization.errors import TokenizationError
from tokenization.local import LocalTokenizer
from tokenization.segments import KeyChainCache

CHAT = "/v1/chat/completions"
PAD = 151655
MODEL = "tiny"


def picture(width: int, height: int, colour: int = 0) -> str:
    with io.BytesIO() as buffer:
        Image.new("RGB", (width, height), (colour % 256, colour // 256, 30)).save(buffer, "PNG")
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def shown(url: str, text: str = "What is it?", **more: Any) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": url}, **more}
    return {"role": "user", "content": [image, {"type": "text", "text": text}]}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (shown("https://example.com/a.png"), "image_url"),
        (shown("data:image/png;base64,AAAA"), "image_data"),
        ({"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:,"}}]}, "media"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "seen before"}]}, "media"),
    ],
)
def test_what_only_the_engine_knows_ends_the_prompt_after_the_turns_before_it(
    vision: LocalTokenizer, message: dict[str, Any], reason: str
) -> None:
    known = [
        {"role": "system", "content": "You see."},
        shown(picture(56, 56)),
        {"role": "assistant", "content": "A box."},
    ]
    after = [*known, message, {"role": "assistant", "content": "?"}, shown(picture(84, 84))]
    result = vision.tokenize(CHAT, {"messages": after}, engine_model=MODEL)
    whole = vision.tokenize(CHAT, {"messages": known, "add_generation_prompt": False}, engine_model=MODEL)
    assert result.token_ids.tolist() == whole.token_ids.tolist()
    assert (result.extras, result.boundaries) == (whole.extras, whole.boundaries)
    assert (result.complete, result.media_unread, len(result.extras)) == (False, reason, 1)
    with pytest.raises(TokenizationError) as failure:
        vision.tokenize(CHAT, {"messages": [message]}, engine_model=MODEL)
    assert (failure.value.status, failure.value.reason) == (None, reason)


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
def test_options_of_the_request_leave_images_to_the_engine(vision: LocalTokenizer, name: str) -> None:
    messages = [{"role": "system", "content": "You see."}, shown(picture(56, 56))]
    result = vision.tokenize(CHAT, {"messages": messages, name: {"image": {}}}, engine_model=MODEL)
    assert (result.media_unread, result.extras) == ("image_options", ())
    assert vision.tokenize(CHAT, {"messages": messages, name: {}}, engine_model=MODEL).complete


def test_a_prompt_that_the_engine_truncates_is_left_to_it(vision: LocalTokenizer) -> None:
    body = {"messages": [shown(picture(280, 280))], "truncate_prompt_tokens": 20}
    with pytest.raises(TokenizationError) as failure:
        vision.tokenize(CHAT, body, engine_model=MODEL)
    assert (failure.value.status, failure.value.reason) == (None, "image_options")


def test_a_template_without_places_for_images_leaves_them_to_the_engine(vision: LocalTokenizer) -> None:
    template = "{% for message in messages %}{% for part in message.content %}x{% endfor %}{% endfor %}"
    body = {"messages": [shown(picture(56, 56))], "chat_template": template}
    with pytest.raises(TokenizationError) as failure:
        vision.tokenize(CHAT, body, engine_model=MODEL)
    assert (failure.value.status, failure.value.reason) == (None, "image_model")


def test_an_image_is_as_many_tokens_as_the_processor_makes_of_it(vision: LocalTokenizer) -> None:
    result = vision.tokenize(CHAT, {"messages": [shown(picture(280, 140), uuid="box")]}, engine_model=MODEL)
    ids = result.token_ids.tolist()
    assert ids.count(PAD) == 50
    ((identifier, offset, length),) = [(extra.identifier, extra.offset, extra.length) for extra in result.extras]
    assert (identifier, ids[offset : offset + length]) == ("box", [PAD] * 50)
    assert (result.complete, result.media, result.media_unread) == (True, ("image",), "")


def test_templates_that_want_strings_get_images_in_front_unless_the_text_has_a_place(vision: LocalTokenizer) -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    for text, rendered in (("Look", f"[{place}\nLook]"), (f"Look {place} here", f"[Look {place} here]")):
        body = {"messages": [shown(picture(28, 28), text)], "chat_template": template}
        result = vision.tokenize(CHAT, body, engine_model=MODEL)
        expected = vision.encode(rendered).tolist()
        at = expected.index(PAD)
        assert result.token_ids.tolist() == [*expected[:at], *[PAD] * 4, *expected[at + 1 :]]
    body = {"messages": [shown(picture(28, 28), place * 2)], "chat_template": template}
    with pytest.raises(TokenizationError) as failure:
        vision.tokenize(CHAT, body, engine_model=MODEL)
    assert failure.value.status == 400


def test_the_placeholder_in_a_text_takes_the_images_place_as_it_does_in_the_engine(vision: LocalTokenizer) -> None:
    messages = [{"role": "user", "content": "say <|image_pad|>"}, shown(picture(56, 56), uuid="small box")]
    result = vision.tokenize(CHAT, {"messages": messages}, engine_model=MODEL)
    ids = result.token_ids.tolist()
    assert result.extras[0].offset == ids.index(PAD) < ids.index(151652)
    assert ids.count(PAD) == 4 + 1


def test_fifty_turns_with_an_image_each_read_every_image_once_and_hash_only_new_blocks(
    vision: LocalTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = images.header_of
    monkeypatch.setattr(images, "header_of", lambda data: read.append(len(data)) or real(data))
    cache = KeyChainCache(block_keys)
    root, tokens = root_key("m"), 0
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You see."}]
    for turn in range(50):
        messages.append(shown(picture(252, 280, turn), f"Question {turn}?"))
        result = vision.tokenize(CHAT, {"messages": messages}, engine_model=MODEL)
        extras = media_extras(((extra.identifier, extra.offset) for extra in result.extras), 16)
        before, new_tokens, tokens = cache.computed_keys, len(result.token_ids) - tokens, len(result.token_ids)
        keys = cache.keys(result.token_ids, result.boundaries, root, 16, extras)
        assert keys == block_keys(root, result.token_ids, 16, extras)
        # The last turn's header is text that the next prompt continues differently: its blocks are hashed again.
        assert cache.computed_keys - before <= (new_tokens + 32) // 16
        messages.append({"role": "assistant", "content": f"Answer {turn}."})
    assert len(read) == 50
    assert len({extra.identifier for extra in result.extras}) == 50
