"""Which names are accepted, and which base model and adapter they stand for."""

import pytest

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.listing import Listing
from gateway.config_document import Images, Model
from gateway.served_models import Served, ServedModels


def fleet_of(*endpoints: Endpoint) -> Fleet:
    fleet = Fleet()
    for endpoint in endpoints:
        fleet.add(endpoint)
    return fleet


A = Endpoint(name="a", address="10.0.0.1:8000")
B = Endpoint(name="b", address="10.0.0.2:8000")


def test_every_name_is_accepted_while_nobody_knows_a_model() -> None:
    models = ServedModels({}, fleet_of(A))
    assert models.resolve("anything") == Served("anything", "anything")
    assert models.base_of(0) is None


def test_an_unknown_name_is_refused_as_soon_as_one_model_is_known() -> None:
    models = ServedModels({"qwen": Model()}, fleet_of(A))
    assert models.resolve("qwenn") is None
    assert models.names() == ["qwen"]


def test_an_alias_shares_the_keys_of_its_model() -> None:
    models = ServedModels({"qwen": Model(aliases=["gpt-4"])}, fleet_of(A))
    assert models.resolve("gpt-4") == Served("gpt-4", "qwen")


def test_a_listed_adapter_is_resolved_to_its_base() -> None:
    fleet = fleet_of(A, B)
    models = ServedModels({}, fleet)
    fleet.listed(0, Listing(("base", "base-alias"), {"ad1": "/adapters/ad1"}))
    fleet.listed(1, Listing(("base",)))
    assert models.resolve("ad1") == Served("ad1", "base", "ad1")
    assert models.resolve("base-alias") == Served("base-alias", "base")
    serving = models.serving(Served("ad1", "base", "ad1"))
    assert serving[0]
    assert not serving[1]  # it lists its models, and the adapter is not among them
    assert models.adapter_paths(0) == {"ad1": "/adapters/ad1"}


def test_the_engines_model_is_unknown_until_an_engine_lists_it_and_the_configuration_wins() -> None:
    fleet = fleet_of(A, B)
    models = ServedModels({}, fleet)
    served = Served("base", "base")
    assert models.engine_model(served) is None
    fleet.listed(1, Listing(("base",), {"ad1": "/adapters/ad1"}, "Qwen/Qwen2.5-VL-7B-Instruct"))
    assert models.engine_model(served) == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert models.engine_model(Served("ad1", "base", "ad1")) == "Qwen/Qwen2.5-VL-7B-Instruct"
    fleet.listed(1, Listing(("base",), {}, "/models/qwen"))
    assert models.engine_model(served) == "/models/qwen"
    models.configure({"base": Model(images=Images(engine_model="/snapshots/1"))})
    assert models.engine_model(served) == "/snapshots/1"


def test_engines_that_were_started_with_different_models_are_told(caplog: pytest.LogCaptureFixture) -> None:
    fleet = fleet_of(A, B)
    models = ServedModels({}, fleet)
    fleet.listed(0, Listing(("base",), {}, "/models/a"))
    fleet.listed(1, Listing(("base",), {}, "/models/b"))
    assert [models.engine_model(Served("base", "base")) for _ in range(3)] == ["/models/a"] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "engine_models_differ model=base using=/models/a all=/models/a,/models/b"
    ]


def test_endpoints_of_another_model_do_not_serve_this_one() -> None:
    fleet = fleet_of(Endpoint(name="a", address="10.0.0.1:8000", model="one"), B)
    models = ServedModels({}, fleet)
    fleet.listed(1, Listing(("two",)))
    assert models.serving(Served("one", "one"))[:2].tolist() == [True, False]


def test_an_endpoint_that_is_gone_takes_its_names_along() -> None:
    fleet = fleet_of(A)
    models = ServedModels({"kept": Model()}, fleet)
    fleet.listed(0, Listing(("gone",)))
    assert models.resolve("gone")
    fleet.remove(0)
    fleet.release(0)
    assert models.resolve("gone") is None
