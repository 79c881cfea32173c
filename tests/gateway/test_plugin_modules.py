from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fleet.plugin import registered
from gateway import plugin_modules
from gateway.config import load_text

CONFIG = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: from-elsewhere}]\n"
CODE = """
from fleet.plugin import Filter
class Elsewhere(Filter, type="from-elsewhere"):
    "Keep all."
"""


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Entry points of other packages, as the test fills them in."""
    found: list[EntryPoint] = []
    monkeypatch.setattr(plugin_modules.importlib.metadata, "entry_points", lambda group: found)
    plugin_modules.load_plugin_modules.cache_clear()
    yield found
    plugin_modules.load_plugin_modules.cache_clear()
    registered().pop("from-elsewhere", None)  # type: ignore[attr-defined]


def test_a_package_that_cannot_be_imported_is_a_warning_and_costs_only_its_own_plugins(
    points: list[EntryPoint],
) -> None:
    points.append(EntryPoint("broken", "no_such_package.plugins", plugin_modules.GROUP))
    config = load_text("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: []\n")
    text = "\n".join(map(str, config.warnings))
    assert "the plugin package behind entry point 'broken' could not be imported: ModuleNotFoundError" in text


def test_plugins_of_another_package_can_be_named(
    points: list[EntryPoint], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere_plugins.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    points.append(EntryPoint("mine", "elsewhere_plugins", plugin_modules.GROUP))
    assert [it.type for it in load_text(CONFIG).profiles[0].filters] == ["from-elsewhere"]
