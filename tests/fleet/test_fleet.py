import weakref

import numpy as np
import pytest

from fleet.endpoint import DRAINING_LABEL, ROLE_LABEL, Endpoint, Role
from fleet.fleet import Fleet


def endpoint(number: int, **fields: object) -> Endpoint:
    return Endpoint(name=f"e{number}", address=f"10.0.0.{number}:8000", **fields)  # type: ignore[arg-type]


def test_the_same_address_and_rank_cannot_join_twice() -> None:
    fleet = Fleet()
    fleet.add(endpoint(1))
    with pytest.raises(ValueError, match="already in the fleet"):
        fleet.add(endpoint(1))
    fleet.add(endpoint(1, rank=1))


def test_an_unknown_role_label_is_refused_when_the_endpoint_joins() -> None:
    with pytest.raises(ValueError, match="decoed"):
        Fleet().add(endpoint(1, labels={ROLE_LABEL: "decoed"}))


def test_removing_a_slot_that_holds_nothing_is_an_error() -> None:
    with pytest.raises(KeyError, match="slot 3"):
        Fleet().remove(3)


def test_releasing_a_live_slot_is_an_error() -> None:
    fleet = Fleet()
    slot = fleet.add(endpoint(1))
    with pytest.raises(KeyError):
        fleet.release(slot)


def test_a_removed_slot_is_out_of_every_answer_but_not_reused_until_it_is_released() -> None:
    fleet = Fleet(capacity=1)
    slot = fleet.add(endpoint(1))
    fleet.waiting[slot] = 7
    fleet.remove(slot)
    assert fleet.slots().tolist() == []
    assert fleet.slot_of("10.0.0.1:8000") is None
    assert fleet.endpoint(slot).name == "e1"

    other = fleet.add(endpoint(2))
    assert other != slot
    fleet.release(slot)
    assert fleet.add(endpoint(3)) == slot
    assert fleet.waiting[slot] == 0


def test_a_reused_slot_starts_from_defaults_and_those_who_asked_are_told() -> None:
    fleet = Fleet(capacity=1)
    told: list[int] = []
    fleet.when_released.append(told.append)
    slot = fleet.add(endpoint(1))
    fleet.healthy[slot] = False
    fleet.scraped_at[slot] = 12.0
    fleet.attribute("gpu")[slot] = 0.5
    fleet.remove(slot)
    fleet.release(slot)
    assert fleet.add(endpoint(2)) == slot
    assert told == [slot]
    assert fleet.healthy[slot]
    assert fleet.scraped_at[slot] == -np.inf
    assert np.isnan(fleet.attribute("gpu")[slot])


def test_growing_keeps_what_every_column_held() -> None:
    fleet = Fleet(capacity=2)
    slots = [fleet.add(endpoint(number)) for number in range(2)]
    fleet.waiting[slots] = [1, 2]
    fleet.draining[slots[1]] = True
    fleet.attribute("gpu")[slots[0]] = 0.25
    more = [fleet.add(endpoint(number)) for number in range(2, 9)]
    assert fleet.capacity >= 9
    assert fleet.waiting[slots].tolist() == [1, 2]
    assert fleet.attribute("gpu")[slots[0]] == 0.25
    assert sorted(fleet.slots().tolist()) == sorted(slots + more)
    assert slots[1] not in fleet.available()
    for column in (fleet.in_flight, fleet.healthy, fleet.block_tokens, fleet.chosen_at):
        assert len(column) == fleet.capacity


def test_available_leaves_out_unhealthy_tripped_and_draining_endpoints() -> None:
    fleet = Fleet()
    a, b, c, d = (fleet.add(endpoint(number)) for number in range(4))
    fleet.healthy[a], fleet.tripped[b], fleet.draining[c] = False, True, True
    assert fleet.available().tolist() == [d]
    assert len(fleet.slots()) == 4


def test_role_masks_follow_the_fleet_and_unlabelled_is_a_role_of_its_own() -> None:
    fleet = Fleet()
    prefill = fleet.add(endpoint(1, labels={ROLE_LABEL: "prefill"}))
    plain = fleet.add(endpoint(2))
    assert fleet.role_mask({Role.PREFILL})[prefill]
    assert not fleet.role_mask({Role.PREFILL})[plain]
    assert fleet.role_mask({None})[plain]
    before = fleet.generation
    later = fleet.add(endpoint(3, labels={ROLE_LABEL: "prefill"}))
    assert fleet.generation != before
    assert fleet.role_mask({Role.PREFILL})[later]


def test_masks_of_plugins_that_were_replaced_do_not_add_up_while_the_fleet_stays_as_it_is() -> None:
    class Asked:
        """A filter, or what a reload made of it."""

    fleet = Fleet()
    slot = fleet.add(endpoint(1))
    first = Asked()
    gone = weakref.ref(first)
    fleet.mask_of(first, lambda _: True)
    fleet.vector_of("first", lambda _: 1.0)
    del first
    for number in range(2_000):
        assert fleet.mask_of(Asked(), lambda _, number=number: number % 2 == 0)[slot] == (number % 2 == 0)
        assert fleet.vector_of("first", lambda _: 1.0)[slot] == 1.0
    assert gone() is None


def test_replacing_keeps_the_slot_and_changes_labels_only_at_the_same_address() -> None:
    fleet = Fleet()
    slot = fleet.add(endpoint(1))
    fleet.waiting[slot] = 3
    fleet.replace(slot, endpoint(1, labels={ROLE_LABEL: "decode"}))
    assert fleet.role_mask({Role.DECODE})[slot]
    assert fleet.waiting[slot] == 3
    with pytest.raises(ValueError, match="another address"):
        fleet.replace(slot, endpoint(2))


def test_age_is_infinite_until_the_first_scrape() -> None:
    fleet = Fleet(clock=lambda: 10.0)
    slot = fleet.add(endpoint(1))
    slots = fleet.slots()
    assert fleet.age(slots).tolist() == [np.inf]
    fleet.scraped_at[slot] = 9.5
    assert fleet.age(slots).tolist() == [0.5]


def test_an_endpoint_labelled_draining_gets_nothing_new_until_the_label_goes() -> None:
    fleet = Fleet()
    slot = fleet.add(endpoint(1, labels={DRAINING_LABEL: "true"}))
    other = fleet.add(endpoint(2))
    assert fleet.available().tolist() == [other]
    fleet.replace(slot, endpoint(1))
    assert len(fleet.available()) == 2
    fleet.replace(other, endpoint(2, labels={DRAINING_LABEL: "true"}))
    assert fleet.available().tolist() == [slot]
