"""docs/troubleshooting.md has a section for everything that sends people there."""

import re
from pathlib import Path

import pytest

import gateway.doctor.examination  # noqa: F401 - registers the checks
from gateway.doctor.findings import AREAS, PAGE, checks, severities
from gateway.self_watch import ALARMS
from indexer.trust import Reason

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE_TEXT = (REPOSITORY / PAGE).read_text()
SECTIONS = dict(re.findall(r"^### (\S+)\n(.+?)(?=^#|\Z)", PAGE_TEXT, re.M | re.S))
POINTERS = ("stream-distrusted", "gateway-alarm", "routed-blind")
"""Findings that stand for a list of reasons, each with a section of its own."""
GIVEN_AS = re.compile(r'blind(?:=| = |\.labels\()"([a-z_]+)"|(?:unroutable|Unreadable)\("([a-z_]+)"')


def blind_reasons() -> set[str]:
    """Every label of routed_blind, as the code writes it."""
    files = [*(REPOSITORY / "gateway").glob("*.py"), *(REPOSITORY / "tokenization").glob("*.py")]
    found = [match for file in files for match in GIVEN_AS.findall(file.read_text())]
    return {first or second for first, second in found}


@pytest.mark.parametrize("id", sorted(severities()))
def test_every_finding_has_a_section_with_a_fix(id: str) -> None:
    assert id in SECTIONS, f"docs/troubleshooting.md has no section '### {id}'"
    assert "*Fix:*" in SECTIONS[id] or id in POINTERS


@pytest.mark.parametrize("reason", list(Reason))
def test_every_trust_reason_has_a_section(reason: Reason) -> None:
    assert f"trust-{reason}" in SECTIONS


def test_every_blind_reason_has_a_section() -> None:
    reasons = blind_reasons()
    assert {"no_prompt", "tokenizer_timeout", "estimated_tokens", "multimodal"} <= reasons, "the pattern finds them"
    assert {f"blind-{reason}" for reason in reasons} == {name for name in SECTIONS if name.startswith("blind-")}


def test_every_alarm_has_a_section() -> None:
    assert {f"alarm-{alarm}" for alarm in ALARMS} == {name for name in SECTIONS if name.startswith("alarm-")}


def test_every_section_is_about_something_that_exists() -> None:
    prefixes = ("trust-", "blind-", "alarm-")
    assert {name for name in SECTIONS if not name.startswith(prefixes)} == set(severities())


def headings() -> set[str]:
    """Anchors of all headings, as GitHub makes them."""
    names = re.findall(r"^#+ (.+)$", PAGE_TEXT, re.M)
    return {re.sub(r"[^\w\- ]", "", name).strip().lower().replace(" ", "-") for name in names}


def test_links_within_the_page_lead_somewhere() -> None:
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE_TEXT)) <= headings()


def test_links_from_everywhere_else_lead_to_sections() -> None:
    files = [*(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "deploy").glob("**/*.yaml"), REPOSITORY / "README.md"]
    wanted = {it for file in files for it in re.findall(r"troubleshooting\.md#([\w-]+)", file.read_text())}
    assert wanted <= {*SECTIONS, *headings()}


def test_checks_come_in_the_order_in_which_one_would_look() -> None:
    areas = [check.judge.__module__.rpartition(".")[2] for check in checks()]
    assert list(dict.fromkeys(areas)) == list(AREAS)
