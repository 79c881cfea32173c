"""The files of a model directory that decide over its prompts."""

import json
import lzma
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "audio", "video", "boi", "eoi")
_SPECIAL = tuple(f"{kind}_token" for kind in _KINDS)


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What was read. `templates` maps names to sources: "default", and "tool_use" where the model has one."""

    tokenizer: str
    """The text of tokenizer.json."""
    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    model_type: str | None = None
    """config.json's."""
    image_processor: Mapping[str, Any] = {}
    """The image processor's configuration; empty where the model has none."""


def read_model_files(directory: Path) -> ModelFiles:
    """Reads tokenizer.json (or .json.xz), tokenizer_config.json and chat_template.jinja, which wins over the template in
    the configuration, as in transformers; config.json and the image processor's configuration where they are. Raises
    `FileNotFoundError` and `ValueError` that name the file."""
    config = _json(directory / "tokenizer_config.json")
    templates = _config_templates(config)
    for name, file in (("default", "chat_template.jinja"), ("tool_use", "additional_chat_templates/tool_use.jinja")):
        if (directory / file).is_file():
            templates[name] = (directory / file).read_text("utf-8")
    if not templates:
        templates = _config_templates(_json(directory / "chat_template.json"))
    model_type = _json(directory / "config.json").get("model_type")
    return ModelFiles(
        tokenizer=_tokenizer(directory),
        templates=templates,
        special_tokens=_special_tokens(config),
        model_type=model_type if isinstance(model_type, str) else None,
        image_processor=_image_processor(directory),
    )


def _image_processor(directory: Path) -> dict[str, Any]:
    """From processor_config.json where it has one, else preprocessor_config.json, as in transformers."""
    nested = _json(directory / "processor_config.json").get("image_processor")
    return nested if isinstance(nested, dict) else _json(directory / "preprocessor_config.json")


def _tokenizer(directory: Path) -> str:
    plain, packed = directory / "tokenizer.json", directory / "tokenizer.json.xz"
    if plain.is_file():
        return plain.read_text("utf-8")
    if packed.is_file():
        with lzma.open(packed) as file:
            return file.read().decode("utf-8")
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory}: no such directory; expected a model's, with tokenizer.json or tokenizer.json.xz"
        )
    raise FileNotFoundError(f"{directory}: no tokenizer.json and no tokenizer.json.xz; is this a model's directory?")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


def _config_templates(config: Mapping[str, Any]) -> dict[str, str]:
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {item["name"]: item["template"] for item in value}
    return {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text; a token is written as its text or as an object with `content`."""
    tokens = {}
    for name in _SPECIAL:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def find_model_directory(name: str, cache: Path | None = None) -> Path:
    """The directory of a model: `name` itself where it is one, else the snapshot of the Hugging Face hub's `name` in the
    local cache (`cache`, or where the environment says it is). Nothing is downloaded: raises `FileNotFoundError`."""
    if Path(name).is_dir():
        return Path(name)
    if cache is None:
        home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
        cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    model = cache / f"models--{name.replace('/', '--')}"
    main = model / "refs" / "main"
    snapshots = [model / "snapshots" / main.read_text().strip()] if main.is_file() else []
    snapshots += sorted((model / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for snapshot in snapshots:
        if (snapshot / "tokenizer.json").is_file():
            return snapshot
    raise FileNotFoundError(f"{name}: no such directory, and no snapshot with a tokenizer.json under {model}")
