"""docs/configuration.md says what is so."""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.plugin import Scorer, registered
from fleet.request import Request
from gateway.config import load_text
from gateway.config_document import Settings

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def keys_of(struct: type[msgspec.Struct], prefix: str = "") -> set[str]:
    """Every leaf key of a section, dotted."""
    found: set[str] = set()
    for field in msgspec.structs.fields(struct):
        inner = [it for it in _types(field.type) if isinstance(it, type) and issubclass(it, msgspec.Struct)]
        name = prefix + field.encode_name
        found |= keys_of(inner[0], f"{name}.NAME." if "dict" in str(field.type) else f"{name}.") if inner else {name}
    return found


def _types(kind: Any) -> list[Any]:
    return [kind, *(inner for arg in getattr(kind, "__args__", ()) for inner in _types(arg))]


def test_every_setting_of_our_section_is_in_the_table() -> None:
    section = PAGE.split("## The section")[1].split("\n## ")[0]
    written = {key for row in re.findall(r"^\| (.*?) \|", section, re.M) for key in re.findall(r"`([^`]+)`", row)}
    assert written == keys_of(Settings)


def test_the_document_shown_is_read_without_a_problem_in_its_shape() -> None:
    shown = yaml.safe_load(blocks("yaml")[0])
    shown["plugins"] = [
        {"type": type_}
        for type_ in (
            "queue-scorer",
            "metrics-data-source",
            "core-metrics-extractor",
            "utilization-detector",
            "openai-parser",
        )
    ] + [{"type": "static-discovery", "parameters": {"endpoints": [{"name": "a", "address": "127.0.0.1"}]}}]
    assert load_text(yaml.safe_dump(shown)).warnings == []


def test_the_plugin_shown_works() -> None:
    scope: dict[str, Any] = {"__name__": "shown"}
    try:
        exec(compile(blocks("python")[0], "docs/configuration.md", "exec"), scope)
        config = load_text(
            "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
            "plugins: [{type: my-zone-scorer, parameters: {zone: a}}]\n"
        )
        (scorer, _), *_ = config.profiles[0].scorers
        fleet = Fleet()
        for number, zone in enumerate("ab"):
            fleet.add(Endpoint(name=zone, address=f"10.0.0.{number}:80", labels={"zone": zone}))
        assert isinstance(scorer, Scorer)
        request = Request(id="r", model="m", target_model="m", path="/")
        assert np.array_equal(scorer.score(request, fleet.slots(), fleet), [1.0, 0.0])
    finally:
        registered().pop("my-zone-scorer", None)  # type: ignore[attr-defined]
