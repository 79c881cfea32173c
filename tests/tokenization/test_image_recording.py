"""Recordings of a real Qwen2.5-VL (tests/data/images): from the client's body to the engine's blocks."""

import json
from pathlib import Path
from typing import Any

import pytest

from event_ingest.limits import Limits
from event_ingest.pipeline import EventPath
from event_ingest.recording import read
from event_ingest.replaying import Outcomes, replay_recording
from indexer.block_key import block_keys, media_extras, root_key
from indexer.index import Index
from tests.tokenization.conftest import REPOSITORY
from tokenization.local import LocalTokenizer

RECORDINGS = sorted((REPOSITORY / "tests" / "data" / "images").glob("*.jsonl"))
BLOCK_TOKENS = 32


def meta_of(recording: Path) -> dict[str, Any]:
    """With the images back in the bodies."""
    meta = json.loads(recording.with_suffix(".meta.json").read_text())
    requests = json.dumps(meta["requests"])
    for at, image in enumerate(meta["images"]):
        requests = requests.replace(f"@{at}@", image)
    return {**meta, "requests": json.loads(requests)}


def engine_model(meta: dict[str, Any]) -> str:
    args: list[str] = meta["engine"]["args"]
    return args[args.index("--model") + 1]


@pytest.fixture(params=RECORDINGS, ids=lambda path: path.stem)
def recording(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_every_recorded_prediction_is_the_engines_figure(recording: Path) -> None:
    report = replay_recording(recording, recording.with_suffix(".meta.json"))
    total = len(meta_of(recording)["requests"])
    assert report.requests == Outcomes(total=total, exact=total)
    assert report.hashes.checked > 10
    assert (report.hashes.wrong, report.mismatch) == (0, "")


def test_the_local_tokenizer_makes_of_every_body_what_the_engine_made_of_it(
    recording: Path, vision: LocalTokenizer
) -> None:
    meta = meta_of(recording)
    with_images = 0
    for request in meta["requests"]:
        result = vision.tokenize(request["path"], request["body"], engine_model=engine_model(meta))
        features = request["features"]
        names = features.get("mm_hashes", {}).get("image", [])
        places = features.get("mm_placeholders", {}).get("image", [])
        theirs = [(name, place["offset"], place["length"]) for name, place in zip(names, places, strict=True)]
        ours = [(extra.identifier, extra.offset, extra.length) for extra in result.extras]
        if result.complete:
            assert result.token_ids.tolist() == request["prompt_token_ids"]
            assert ours == theirs
            with_images += bool(ours)
        else:
            assert result.media_unread == "image_data"
            assert result.token_ids.tolist() == request["prompt_token_ids"][: len(result.token_ids)]
            assert ours == theirs[: len(ours)]
    assert with_images > 5


def test_keys_of_bodies_are_the_keys_of_the_blocks_that_the_engine_announced(
    recording: Path, vision: LocalTokenizer
) -> None:
    meta, index = meta_of(recording), Index()
    path = EventPath(index, 0, name="engine", model="vision", can_replay=False, limits=Limits())
    path.connected(0.0)
    for message in read(recording):
        path.feed(message.frames, message.t)
    for request in meta["requests"]:
        prompt = vision.tokenize(request["path"], request["body"], engine_model=engine_model(meta))
        extras = media_extras(((extra.identifier, extra.offset) for extra in prompt.extras), BLOCK_TOKENS)
        keys = block_keys(root_key("vision", salt=prompt.salt), prompt.token_ids, BLOCK_TOKENS, extras)
        assert index.match(keys).by_slot() == {0: len(keys)}
