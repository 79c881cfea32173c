"""Which names are accepted, and which base model and adapter they stand for."""

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.listing import Listing
from gateway.config_document import Model
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
