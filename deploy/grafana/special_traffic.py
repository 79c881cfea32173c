"""What chats do not show: bursts of one prompt, and prompts with images, as a trial sends them beside its chats."""

import asyncio
import base64
import io
import itertools
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from PIL import Image

from gateway.demo_traffic import Observation, Shape, ask, client_session, plan

FAN_OUT = 8
"""Requests of one burst."""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 200_704,
    "patch_size": 14,
    "merge_size": 2,
}
"""Qwen2.5-VL's preprocessor_config.json with smaller images."""


def model_with_images(text_model: Path, folder: Path) -> Path:
    """A copy of a Qwen text model's files in `folder` whose images the router can name, as if it was a Qwen2.5-VL."""
    shutil.copytree(text_model, folder)
    (folder / "config.json").write_bytes(msgspec.json.encode({"model_type": "qwen2_5_vl"}))
    (folder / "preprocessor_config.json").write_bytes(msgspec.json.encode(PROCESSOR))
    return folder


async def bursts(url: str, model: str, count: int, pause_s: float, seed: int = 11) -> list[Observation]:
    """`count` times: one new document in `FAN_OUT` requests at once, beside a prompt that nobody else sends."""
    short = Shape(
        requests=2 * count, turns=1, groups=2 * count, spread_s=0, seed=seed, system_words=300, document_words=1200
    )
    documents = plan(short)
    observations: list[Observation] = []
    async with client_session() as session:
        for fanned, other in zip(documents[::2], documents[1::2], strict=True):
            await asyncio.sleep(pause_s)
            chats = [[_said(it.system + it.turns[0])] for it in (*itertools.repeat(fanned, FAN_OUT), other)]
            answers = await asyncio.gather(*(ask(session, url, model, chat, max_tokens=8) for chat in chats))
            observations += [observation for observation, _ in answers]
    return observations


async def pictures(url: str, model: str, turns: int, pause_s: float, seed: int = 12) -> list[int]:
    """Chats about images, the statuses of their answers: one image in every turn again, each turn with one of another kind:
    another size, behind a URL, broken base64. Simulated engines take no images and answer 400; the router has read them."""
    dice = random.Random(seed)
    first, statuses = _picture(dice), []
    async with client_session() as session:
        for turn in range(turns):
            await asyncio.sleep(pause_s)
            second = (_picture(dice), "https://example.com/a.png", "data:image/png;base64,%")[turn % 3]
            statuses.append(await _show(session, url, model, (first, second)))
    return statuses


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def _show(session: aiohttp.ClientSession, url: str, model: str, images: Sequence[str]) -> int:
    turns = [{"role": "system", "content": "You look at pictures."}, *map(_shown, images)]
    body = {"model": model, "messages": turns, "max_tokens": 8}
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        await answer.read()
        return answer.status


def _shown(url: str) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}


def _picture(dice: random.Random) -> str:
    width, height = (dice.randrange(56, 448) for _ in "wh")
    with io.BytesIO() as buffer:
        Image.new("RGB", (width, height), (dice.randrange(256), 80, 30)).save(buffer, "PNG")
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
