"""Media names of engines, and what an unknown one may claim."""

import pytest

from indexer import tier


@pytest.mark.parametrize("medium", ["nvme-of", "TAPE", "cpu "])
def test_an_unknown_medium_counts_as_the_slowest_tier_and_is_known_to_be_unknown(medium: str) -> None:
    assert tier.tier_of(medium) == tier.DISK
    assert not tier.is_known(medium)


@pytest.mark.parametrize(
    ("medium", "expected"),
    [
        (None, tier.GPU),
        ("", tier.GPU),
        ("GPU", tier.GPU),
        ("CPU", tier.CPU),
        ("cpu", tier.CPU),
        ("Cpu_Pinned", tier.CPU),
        ("STORAGE", tier.DISK),
        ("DISK", tier.DISK),
        ("EXTERNAL", tier.DISK),
    ],
)
def test_media_are_known_whatever_their_case(medium: str | None, expected: int) -> None:
    assert tier.tier_of(medium) == expected
    assert tier.is_known(medium)


def test_tiers_are_ordered_from_fast_to_slow_and_named() -> None:
    assert (tier.GPU, tier.CPU, tier.DISK) == (0, 1, 2)
    assert tier.NAMES[tier.CPU] == "cpu"
