from pathlib import Path

import msgspec
import pytest

from fleet.plugin import registered
from gateway import plugin_docs
from gateway.config_source import ConfigError
from gateway.plugin_modules import load_plugin_modules

DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"


def test_an_unknown_type_suggests_the_nearest_and_an_unsupported_one_says_why() -> None:
    with pytest.raises(ConfigError, match="no plugin type 'queue-scorrer'; did you mean 'queue-scorer'"):
        plugin_docs.find("queue-scorrer")
    with pytest.raises(ConfigError, match=r"'latency-scorer' is not supported: .* Instead: expected-work-scorer"):
        plugin_docs.find("latency-scorer")


def test_the_page_in_docs_is_current() -> None:
    assert DOCS.read_text() == plugin_docs.page(), "run: warmroute docs --write docs"


def test_every_plugin_says_what_it_does_and_every_parameter_what_it_means() -> None:
    for page in plugin_docs.pages(ours=True):
        assert page.summary, page.type
        assert page.summary[0].isupper(), page.type
        for parameter in page.parameters:
            described = parameter.description or "." in parameter.name  # a nested name may say enough
            assert described, f"{page.type}: {parameter.name}"


def test_every_registered_type_has_a_page() -> None:
    load_plugin_modules()
    shown = {name for page in plugin_docs.pages() for name in (page.type, *page.aliases)}
    assert shown == set(registered())


def test_nested_parameters_are_flattened_with_their_defaults() -> None:
    page = plugin_docs.find("precise-prefix-cache-producer")
    rows = {parameter.name: parameter for parameter in page.parameters}
    assert rows["kvEventsConfig.podDiscoveryConfig.socketPort"].default == "5557"
    assert rows["kvEventsConfig.engineType"].type == "vllm | sglang"
    assert rows["speculativeTTL"].default == "2s"
    assert rows["indexerConfig.kvCacheBackendConfigs[].weight"].required


def test_an_older_name_finds_the_page() -> None:
    assert plugin_docs.find("tokenizer").type == "token-producer"


def test_text_and_listing_show_defaults_and_kinds() -> None:
    text = plugin_docs.text(plugin_docs.find("load-aware-scorer"))
    assert "threshold: integer, default 128" in text
    listing = plugin_docs.listing()
    assert "Scorers\n" in listing
    assert "pd-profile-handler" in listing
    assert "(deprecated)" in listing


def test_pages_are_plain_data() -> None:
    assert msgspec.json.decode(msgspec.json.encode(plugin_docs.pages()))[0]["type"]
