"""Usual mistakes in a configuration: each is told on its own line, with what would be right, and nothing follows from it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import cli
from gateway.config import load_text
from gateway.config_source import ConfigError

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
TWO_ENDPOINTS = """\
plugins:
- type: static-discovery
  parameters:
    endpoints:
    - {{name: a, address: 10.0.0.1, port: 8001, {first}}}
    - {{name: b, address: 10.0.0.1, {second}}}
"""
DISCOVERY = "dataLayer: {discovery: {pluginRef: static-discovery}}\n"


def told(text: str) -> tuple[list[str], list[str]]:
    """(problems, warnings) of a configuration."""
    try:
        return [], [str(it) for it in load_text(HEAD + text, "c.yaml").warnings]
    except ConfigError as error:
        return [str(it) for it in error.problems], [str(it) for it in error.warnings]


def fleet(first: str, second: str) -> tuple[list[str], list[str]]:
    return told(TWO_ENDPOINTS.format(first=first, second=second) + DISCOVERY)


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ("port: 8001", "port: 10.0.0.1:8001 is already endpoints[0]"),
        ("port: 8001, dataParallelSize: 2", "port: 10.0.0.1:8001 rank 0 is already endpoints[0]"),
        ("name: a, port: 8002", None),
        (
            "port: 8002, events: 'tcp://*:5557'",
            "events: 'tcp://*:5557' is where an engine listens; write its port, 5557",
        ),
        ("port: 8002, role: prefil", "role: no role 'prefil'; did you mean 'prefill'?"),
    ],
)
def test_a_bad_endpoint_is_told_on_its_own_line(second: str, problem: str | None) -> None:
    problems, _ = fleet("role: decode", second)
    assert len(problems) == 1
    assert problems[0].startswith("c.yaml:8: plugins[0].parameters.endpoints[1].")
    assert problem is None or problem in problems[0]


def test_several_bad_endpoints_are_several_problems() -> None:
    problems, _ = fleet("events: x", "port: 8002, replay: y")
    assert [it.split(": ")[0] for it in problems] == ["c.yaml:7", "c.yaml:8"]


@pytest.mark.parametrize(
    ("first", "second", "key", "other"),
    [
        ("events: 5557", "port: 8002, events: 5557", "events", "a's events"),
        ("replay: 5657", "port: 8002, replay: 5657", "replay", "a's replay"),
        ("events: 5557, replay: 5558, dataParallelSize: 2", "port: 8002", "events", "a-rank-0's replay"),
    ],
)
def test_sockets_that_two_engines_or_ranks_cannot_both_have_are_warned_about(
    first: str, second: str, key: str, other: str
) -> None:
    problems, warned = fleet(first, second)
    assert problems == []
    assert any(f".{key}: tcp://10.0.0.1:" in it and f"is {other} too" in it for it in warned), warned


def test_ports_that_differ_are_no_warning() -> None:
    assert fleet("events: 5557, replay: 5657", "port: 8002, events: 5558, replay: 5658") == ([], [])


def test_parameters_beside_parameters_are_told_where_they_belong_and_nothing_follows() -> None:
    text = (
        "plugins:\n- type: token-producer\n  parameters:\n  local: {path: x}\n- type: precise-prefix-cache-producer\n"
    )
    problems, warned = told(text)
    assert problems == [
        "c.yaml:6: plugins[0].local: a parameter of 'token-producer'; write it under 'parameters:', indented further than that"
    ]
    assert not any("estimated" in it for it in warned)


def test_a_type_that_is_named_and_not_declared_says_how_to_declare_it() -> None:
    problems, _ = told("plugins: []\nflowControl: {saturationDetector: {pluginRef: utilization-detector}}\n")
    assert "declare it: add '- type: utilization-detector' to plugins" in problems[0]


def test_a_config_map_is_recognized() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text("apiVersion: v1\nkind: ConfigMap\ndata:\n  a.yaml: |\n    x: 1\n", "c.yaml")
    (problem,) = caught.value.problems
    assert str(problem).startswith("c.yaml:2: kind: expected 'EndpointPickerConfig', got 'ConfigMap'")


def test_a_tokenizer_that_is_a_file_is_no_missing_directory(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    parameters = f"local: {{path: {tmp_path}/tokenizer.json}}"
    problems, _ = told(f"plugins:\n- type: token-producer\n  parameters: {{{parameters}}}\n")
    assert "tokenizer.json is a file; expected the directory that holds it" in problems[0]


def test_a_window_in_milliseconds_is_a_number() -> None:
    problems, _ = told("plugins:\n- type: burst-prefix-cache-producer\n  parameters: {windowDurationMs: 100ms}\n")
    assert "windowDurationMs: expected a whole number of milliseconds, without a unit, got '100ms'" in problems[0]


@pytest.mark.parametrize("plugin", ["p2p-source-producer", "expected-work-scorer", "cost-pd-decider"])
def test_what_comes_with_no_producer_of_its_own_takes_the_precise_one_without_a_warning(plugin: str) -> None:
    _, warned = told(f"plugins:\n- type: precise-prefix-cache-producer\n- type: {plugin}\n")
    assert not any("not given" in it for it in warned)


def test_a_misspelt_command_gets_the_nearest_name() -> None:
    result = CliRunner().invoke(cli, ["chek"])
    assert (result.exit_code, "Did you mean 'check'?" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("document", "warning"),
    [
        (None, "cannot be read: No such file or directory; `serve` does not start without it"),
        ("endpoint: []\n", "expected a mapping with a list `endpoints`"),
        ("endpoints: [{name: a, adress: 10.0.0.1}]\n", "endpoints[0].adress: not a known key; did you mean 'address'?"),
        ("endpoints: [{name: a, address: 10.0.0.1}]\n", None),
    ],
)
def test_check_looks_into_the_file_of_a_file_discovery(
    tmp_path: Path, document: str | None, warning: str | None
) -> None:
    plugins = "plugins:\n- type: file-discovery\n  parameters: {path: fleet.yaml}\n"
    config, file = tmp_path / "c.yaml", tmp_path / "fleet.yaml"
    config.write_text(HEAD + plugins + "dataLayer: {discovery: {pluginRef: file-discovery}}\n")
    if document is not None:
        file.write_text(document)
    result = CliRunner().invoke(cli, ["check", "-c", str(config)])
    lines = [f"warning: {file}: {warning}"] if warning else []
    assert (result.exit_code, result.output.splitlines()) == (0, [*lines, f"{config}: ok"])
