import pytest

from fleet.endpoint import Role
from fleet.endpoints_document import MAX_BYTES, parse

ONE = "endpoints: [{name: a, address: 10.0.0.1, port: '8000'}]"


def problems(entry: str) -> str:
    document = parse("endpoints: [{name: good, address: 10.9.9.9}, {name: bad, " + entry + "}]", "fleet.yaml")
    assert [endpoint.name for endpoint in document.endpoints] == ["good"], "the good one must survive"
    assert len(document.problems) == 1
    return document.problems[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping with a list `endpoints`"),
        ("endpoints: 3", "expected a mapping with a list `endpoints`"),
        ("{endpoints: [], endpoint: []}", "endpoint: not a known key"),
        ("endpoints: [", "not YAML"),
        ("#" * (MAX_BYTES + 1), "larger than"),
    ],
)
def test_what_is_no_endpoints_document_is_an_error_that_names_the_file(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^fleet.yaml: .*{message}"):
        parse(text, "fleet.yaml")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("adress: 10.0.0.1", "fleet.yaml: endpoints[1].adress: not a known key; did you mean 'address'?"),
        ("address: engine-1", "endpoints[1].address: expected an IP address such as 10.0.0.11"),
        ("address: 10.0.0.1, port: 70000", "endpoints[1].port"),
        ("address: 10.0.0.1, port: http", "endpoints[1].port: expected a port from 1 to 65535, got 'http'"),
        ("address: 10.0.0.1, role: decod", "endpoints[1].role: no role 'decod'; did you mean 'decode'?"),
        ("address: 10.0.0.1, labels: {llm-d.ai/role: prefil}", "endpoints[1].labels: no role 'prefil'"),
        ("address: 10.0.0.1, role: decode, labels: {llm-d.ai/role: prefill}", "the label llm-d.ai/role says 'prefill'"),
        ("address: 10.0.0.1, labels: {a: 1}", "endpoints[1].labels[...]: Expected `str`, got `int`"),
        (
            "address: 10.0.0.1, events: http://10.0.0.1:5557",
            "endpoints[1].events: expected a port, tcp://host:port or bind:",
        ),
        (
            "address: 10.0.0.1, replay: bind:tcp://10.0.0.1:5557",
            "endpoints[1].replay: expected a port, tcp://host:port, got",
        ),
        (
            "address: 10.0.0.1, events: tcp://10.0.0.1:65535, dataParallelSize: 2",
            "endpoints[1].events: expected a port",
        ),
        ("address: 10.0.0.1, rank: 1, dataParallelSize: 2", "exclude each other"),
        ("address: 10.9.9.9", ".port: 10.9.9.9:8000 is already endpoints[0]"),
        ("address: 10.0.0.1, rank: -1", "endpoints[1].rank"),
    ],
)
def test_a_bad_entry_costs_itself_and_says_where_and_what_would_be_right(entry: str, message: str) -> None:
    assert message in problems(entry)


def test_a_name_is_unique_within_its_namespace_only() -> None:
    same = parse("endpoints: [{name: a, address: 10.0.0.1}, {name: a, address: 10.0.0.2}]", "f")
    assert "endpoints[1].name: 'a' is taken by endpoints[0]" in same.problems[0]
    other = parse("endpoints: [{name: a, address: 10.0.0.1}, {name: a, namespace: x, address: 10.0.0.2}]", "f")
    assert not other.problems


def test_llmds_own_form_is_accepted_with_its_defaults() -> None:
    (endpoint,) = parse("endpoints: [{name: a, address: 10.0.0.1, labels: {llm-d.ai/role: both}}]", "f").endpoints
    assert (endpoint.address, endpoint.namespace, endpoint.role) == ("10.0.0.1:8000", "default", Role.BOTH)
    assert (endpoint.events, endpoint.replay, endpoint.rank) == (None, None, 0)
    assert parse(ONE, "f").endpoints[0].address == "10.0.0.1:8000"


def test_json_is_yaml() -> None:
    assert parse(b'{"endpoints": [{"name": "a", "address": "::1", "port": 9}]}', "f").endpoints[0].address == "[::1]:9"


def test_an_event_port_means_the_same_host_and_an_address_is_taken_as_it_is() -> None:
    text = "endpoints: [{name: a, address: 10.0.0.1, events: 5557, replay: 'tcp://10.0.0.7:5558'}]"
    (endpoint,) = parse(text, "f").endpoints
    assert (endpoint.events, endpoint.replay) == ("tcp://10.0.0.1:5557", "tcp://10.0.0.7:5558")
    (bound,) = parse("endpoints: [{name: a, address: 10.0.0.1, events: 'bind:tcp://*:5557'}]", "f").endpoints
    assert bound.events == "bind:tcp://*:5557"


@pytest.mark.parametrize("key", ["events", "replay"])
@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]"])
def test_an_engines_own_listening_address_is_no_address_to_connect_to(key: str, host: str) -> None:
    (problem,) = parse(f"endpoints: [{{name: a, address: 10.0.0.1, {key}: 'tcp://{host}:5557'}}]", "f").problems
    assert problem.startswith(f"f: endpoints[0].{key}: 'tcp://{host}:5557' is where an engine listens")
    assert "write its port, 5557" in problem


def test_ranks_expand_into_endpoints_with_ports_that_count_up() -> None:
    text = "endpoints: [{name: a, address: 10.0.0.1, events: 5557, replay: 5600, dataParallelSize: 3, role: prefill}]"
    endpoints = parse(text, "f").endpoints
    assert [endpoint.name for endpoint in endpoints] == ["a-rank-0", "a-rank-1", "a-rank-2"]
    assert [endpoint.rank for endpoint in endpoints] == [0, 1, 2]
    assert {endpoint.address for endpoint in endpoints} == {"10.0.0.1:8000"}
    assert [endpoint.events for endpoint in endpoints] == [f"tcp://10.0.0.1:{port}" for port in (5557, 5558, 5559)]
    assert [endpoint.replay for endpoint in endpoints] == [f"tcp://10.0.0.1:{port}" for port in (5600, 5601, 5602)]
    assert {endpoint.role for endpoint in endpoints} == {Role.PREFILL}


def test_a_single_rank_keeps_its_ports_as_written() -> None:
    (endpoint,) = parse("endpoints: [{name: a, address: 10.0.0.1, events: 5558, rank: 1}]", "f").endpoints
    assert (endpoint.rank, endpoint.events) == (1, "tcp://10.0.0.1:5558")
