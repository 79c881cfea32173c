"""From the configuration to tokenizers: what is said of a model's images reaches the tokenizer that names them."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from gateway.config import load_text
from gateway.served_models import Served
from gateway.tokenizers import Tokenizers
from tests.tokenization.conftest import QWEN3
from tokenization.backends import LocalBackend
from tokenization.images import Placed

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: static-discovery
  parameters: {endpoints: [{name: a, address: 127.0.0.1}]}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer}]
dataLayer: {discovery: {pluginRef: static-discovery}}
"""


@pytest.fixture
def vision(tmp_path: Path) -> Path:
    shutil.copy(QWEN3 / "tokenizer.json.xz", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    return tmp_path


async def test_what_is_said_of_images_reaches_the_tokenizer(vision: Path) -> None:
    config = yaml.safe_load(CONFIG)
    images = {"hash": "sha256", "minPixels": 28 * 28 * 9}
    config["warmroute"] = {
        "models": {"a": {"tokenizer": str(vision)}, "b": {"tokenizer": str(vision), "images": images}}
    }
    tokenizers = await Tokenizers.load(load_text(json.dumps(config)))
    places = {}
    for name in ("a", "b"):
        backend = tokenizers.backend(Served(name, name))
        assert isinstance(backend, LocalBackend)
        rules = backend.tokenizer.images
        assert rules is not None
        places[name] = rules.reader.place(PIXEL, None, "m")
    await tokenizers.close()
    assert {name: place.tokens for name, place in places.items() if isinstance(place, Placed)} == {"a": 4, "b": 9}
    assert len({place.identifier for place in places.values() if isinstance(place, Placed)}) == 2
