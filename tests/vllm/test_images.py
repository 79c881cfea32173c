"""Chats with images: the router's picture of a real Qwen2.5-VL against what the engine reports as cached.

Once with the router's own tokenizer, once with the engine's /render. Where WARMROUTE_VLLM_RECORD names a folder, events and
requests of the first go there as a recording (tests/data/images); figures go to the file that WARMROUTE_VLLM_REPORT
names, with `.images` at its end.
"""

import asyncio
import base64
import io
import json
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from PIL import Image

from event_ingest.recording import Message, write_line
from tests.vllm.conftest import BLOCK_TOKENS, Fleet, Served

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
MODEL = "vision"
SYSTEM = "You look at pictures for the harbor office and say in one sentence what is in them. " * 4
ORIENTATION = 0x0112

Json = dict[str, Any]


def picture(
    colour: int, kind: str = "PNG", size: tuple[int, int] = (280, 224), mode: str = "RGB", turned: int = 1
) -> str:
    """A data URL: 80 tokens at the usual size."""
    image = Image.new("RGB", size, (colour % 256, 7 * colour % 256, 90))
    image.paste((200, 40, colour % 256), (10, 10, 60 + colour % 40, 70))
    if mode in ("RGBA", "LA"):
        image.putalpha(128)
    exif = Image.Exif()
    exif[ORIENTATION] = turned
    with io.BytesIO() as buffer:
        image.convert(mode).save(buffer, kind, **({"exif": exif} if turned != 1 else {}))
        return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def shown(text: str, *urls: str, uuid: str | None = None) -> Json:
    parts: list[Json] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    if uuid is not None:
        parts = [{**part, "uuid": uuid} for part in parts]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


class Recorder:
    """Events of both engines, and the requests with what the engine's /render made of them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.lines: dict[int, list[str]] = {}
        self.requests: dict[int, list[Json]] = {}

    async def listen(self, port: int) -> None:
        events = zmq.asyncio.Context.instance().socket(zmq.SUB)
        events.subscribe(b"")
        events.connect(f"tcp://127.0.0.1:{port}")
        try:
            while True:
                frames = await events.recv_multipart()
                self.lines.setdefault(port, []).append(write_line(Message(time.time(), port, tuple(frames))))
        finally:
            events.close(0)

    async def note(self, path: str, body: Json, row: Json, began: float) -> None:
        async with self._fleet.session.post(self._fleet.engines[0].url + path + "/render", json=body) as response:
            rendered = await response.json()
        number = next(at for at, engine in enumerate(self._fleet.engines) if engine.address == row["endpoint"])
        port = self._fleet.ports.engines[number].events
        features = rendered["features"] or {}
        self.requests.setdefault(port, []).append(
            {
                "path": path,
                "t0": began,
                "body": json.loads(json.dumps(body)),  # chats grow in place
                "prompt_token_ids": rendered["token_ids"],
                "features": {name: features[name] for name in ("mm_hashes", "mm_placeholders") if name in features},
                "cached_tokens": row["cached"],
            }
        )

    def write(self, folder: Path, model: Path) -> None:
        """One recording per engine, of the requests that it served. Bodies say `@3@` for the fourth of `images`."""
        folder.mkdir(parents=True, exist_ok=True)
        args = ["--model", str(model), "--served-model-name", MODEL, "--block-size", str(BLOCK_TOKENS)]
        about = {"description": "Chats with images (tests/vllm/test_images.py).", "vllm": "0.32.0"}
        engine = {"env": {"PYTHONHASHSEED": "42"}, "args": args}
        for number, port in enumerate(sorted(self.requests)):
            (folder / f"vision_{number}_b32.jsonl").write_text("".join(self.lines[port]))
            requests = json.dumps(self.requests[port])
            images = list(dict.fromkeys(re.findall(r"[A-Za-z0-9+/=]{100,}", requests)))
            for at, image in enumerate(images):
                requests = requests.replace(image, f"@{at}@")
            meta = {**about, "engine": engine, "images": images, "requests": json.loads(requests)}
            (folder / f"vision_{number}_b32.meta.json").write_text(json.dumps(meta) + "\n")


class Client:
    """Sends one request after the other and keeps what was predicted and what was reported."""

    def __init__(self, fleet: Fleet, recorder: Recorder | None) -> None:
        self._fleet, self._recorder = fleet, recorder
        self.rows: list[Json] = []

    async def ask(self, path: str, body: Json, about: str, **more: Any) -> Json:
        began = time.time()
        async with self._fleet.session.post(self._fleet.url + path, json=body) as response:
            answer = await response.json(content_type=None)
            headers = response.headers
        assert response.status == 200, answer
        usage = answer["usage"]
        details = usage.get("prompt_tokens_details") or {}
        row = {
            "about": about,
            "endpoint": headers["x-warmroute-endpoint"],
            "predicted": int(headers["x-warmroute-predicted-cached-tokens"]),
            "cached": details.get("cached_tokens", usage.get("cache_read_input_tokens")),
            "prompt_tokens": usage.get("prompt_tokens", usage.get("input_tokens")),
            "trust": headers["x-warmroute-trust"],
            **more,
        }
        self.rows.append(row)
        if self._recorder is not None:
            await self._recorder.note(path, body, row, began)
        await self._fleet.settle()
        row["answer"] = answer["choices"][0]["message"]["content"] if path == CHAT else ""
        return row

    async def chat(self, messages: list[Json], about: str, **more: Any) -> Json:
        body = {"model": MODEL, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "messages": messages}
        return await self.ask(CHAT, body, about, **more)


Start = Callable[[str], Any]


@pytest.fixture
async def start(tmp_path: Path, models: Path) -> AsyncIterator[Start]:
    """Two engines behind gateway and Envoy, for a backend of the token producer."""
    async with AsyncExitStack() as stack:

        async def started(backend: str) -> Fleet:
            def configure(config: Json) -> None:
                url = f"http://127.0.0.1:{config['plugins'][0]['parameters']['endpoints'][0]['port']}"
                producer = next(plugin for plugin in config["plugins"] if plugin["type"] == "token-producer")
                local = {"local": {"path": str(folder)}}
                producer["parameters"] = local if backend == "local" else {"modelName": MODEL, "vllm": {"url": url}}

            folder = models / "vision"
            served = Served(folder, MODEL, blocks=600, options=("--enable-scale-out",))
            return await stack.enter_async_context(Fleet(tmp_path, served, served, configure=configure))

        yield started


@pytest.mark.parametrize("backend", ["local", "engine"])
async def test_predictions_of_chats_with_images_are_the_engines_own_figures(
    start: Start, backend: str, models: Path
) -> None:
    fleet = await start(backend)
    folder = os.environ.get("WARMROUTE_VLLM_RECORD") if backend == "local" else None
    recorder = Recorder(fleet) if folder else None
    listening = [
        asyncio.create_task(recorder.listen(engine.events))
        for engine in (fleet.ports.engines if recorder else ())
        if recorder
    ]
    await asyncio.sleep(1.0)
    client = Client(fleet, recorder)
    system = {"role": "system", "content": SYSTEM}

    # A chat in which pictures come and go.
    boat = picture(1)
    first = [system, shown("What is in this picture?", boat)]
    chat = list(first)
    for turn, message in enumerate(
        [
            None,
            {"role": "user", "content": "Is it the same one as yesterday? " * 4},
            shown("And these two?", picture(2, "JPEG"), picture(3, "PNG", mode="RGBA")),
            shown("This one is turned.", picture(4, "JPEG", (320, 140), turned=6)),
            shown("Grey, and one that moves.", picture(5, "PNG", mode="L"), picture(6, "GIF", mode="P")),
            shown("The last one.", picture(7, "WEBP", (600, 400))),
            {"role": "user", "content": "Thank you."},
        ]
    ):
        chat += [message] if message else []
        row = await client.chat(chat, "chat", turn=turn)
        chat.append({"role": "assistant", "content": row["answer"]})
    assert row["cached"] > row["prompt_tokens"] - 100

    # Another picture of the same size under the same text is another prompt; the same picture is the same.
    other = await client.chat([system, shown("What is in this picture?", picture(99))], "another picture")
    again = await client.chat(first, "the same picture")
    assert other["cached"] < other["prompt_tokens"] - 80
    assert again["cached"] >= again["prompt_tokens"] - BLOCK_TOKENS
    assert other["prompt_tokens"] == again["prompt_tokens"]

    # A client's own name for a picture is what counts, whatever the picture.
    await client.chat([system, shown("A named one?", picture(20), uuid="harbor-1")], "uuid, first")
    named = await client.chat([system, shown("A named one?", picture(21), uuid="harbor-1")], "uuid, same name")
    renamed = await client.chat([system, shown("A named one?", picture(20), uuid="harbor-2")], "uuid, other name")
    assert named["cached"] >= named["prompt_tokens"] - BLOCK_TOKENS
    assert renamed["cached"] < renamed["prompt_tokens"] - 80

    # A salt, text that spells out the placeholder, many pictures at once, and the other API.
    body = {"model": MODEL, "max_tokens": 2, "messages": first, "cache_salt": "tenant"}
    for number in range(2):
        await client.ask(CHAT, body, f"salted {number}")
    for number in range(2):
        spelled = [system, {"role": "user", "content": "say <|image_pad|>"}, shown("Look", boat)]
        await client.chat(spelled, f"placeholder in the text {number}")
    for number in range(2):
        many = shown("Compare them.", *(picture(30 + at, size=(112, 84 + 28 * at)) for at in range(8)))
        await client.chat([system, many], f"many {number}")
    source = {"type": "base64", "media_type": "image/png", "data": boat.partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is in this picture?"}]
    for number in range(2):
        body = {"model": MODEL, "max_tokens": 2, "system": SYSTEM, "messages": [{"role": "user", "content": content}]}
        row = await client.ask(MESSAGES, body, f"messages {number}")

    # A format that only the engine reads: what stands before the picture is matched.
    unread = [system, shown("And this?", picture(50, "AVIF"))]
    for number in range(2):
        row = await client.chat(unread, f"avif {number}", partial=backend == "local")

    for task in listening:
        task.cancel()
    if recorder is not None and folder is not None:
        recorder.write(Path(folder), models / "vision")
    report(backend, client.rows, fleet.started_s)
    wrong = [row for row in client.rows if row["predicted"] != row["cached"] and not row.get("partial")]
    assert wrong == []
    assert all(row["predicted"] <= row["cached"] for row in client.rows)
    assert {row["trust"] for row in client.rows} == {"exact"}
    assert sum(row["cached"] > 100 for row in client.rows) > 10
    if backend == "local":
        await check_that_broken_images_are_refused_alike(fleet)


async def check_that_broken_images_are_refused_alike(fleet: Fleet) -> None:
    """By the router or, where it leaves them to the engine, through it."""
    cut = picture(1)[:-60]
    broken = {
        "not base64": "data:image/png;base64,%%%%",
        "too long": picture(1, size=(1, 201)),
        "no comma": "data:image/png;base64",
        "cut short": cut[: len(cut) // 4 * 4],
        "no image": "data:image/png;base64,AAAA",
        "no base64": "data:image/png,x",
    }
    statuses = {}
    for name, url in broken.items():
        body = {"model": MODEL, "max_tokens": 2, "messages": [shown("What?", url)]}
        answers = []
        for base in (fleet.url, fleet.engines[0].url):
            async with fleet.session.post(base + CHAT, json=body) as response:
                answers.append(response.status)
        statuses[name] = tuple(answers)
    assert statuses == {**dict.fromkeys(broken, (400, 400)), "no base64": (501, 501)}


def report(backend: str, rows: list[Json], started_s: float) -> None:
    counts: Counter[str] = Counter()
    for row in rows:
        difference = row["predicted"] - row["cached"]
        counts["requests"] += 1
        counts["exact" if not difference else "over" if difference > 0 else "under"] += 1
        counts["with_hits"] += row["cached"] > 0
        counts["cached_tokens"] += row["cached"]
        counts["prompt_tokens"] += row["prompt_tokens"]
    figures = {"backend": backend, "started_s": round(started_s), **counts}
    print(json.dumps(figures))
    for row in rows:
        print({key: value for key, value in row.items() if key not in ("answer", "endpoint")})
    if path := os.environ.get("WARMROUTE_VLLM_REPORT"):
        with Path(f"{path}.images").open("a") as out:
            out.write(json.dumps({**figures, "rows": rows}) + "\n")
