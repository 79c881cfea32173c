"""What the doctor can find, and how a check says so.

Every finding has an id that never changes: people grep for it, and docs/troubleshooting.md has an anchor for each. A check is a
function from facts to findings; it is registered with the ids it can report, so that the list of checks, the page and the
tests all come from here.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec

from gateway.doctor.facts import Facts

Severity = Literal["error", "warning"]
"""error: something does not work; warning: it works, and is worth less than it could be, or is fragile."""

PAGE = "docs/troubleshooting.md"
AREAS = (
    *("engine_checks", "event_checks", "event_order_checks", "prompt_checks", "dynamo_checks"),
    *("gateway_checks", "envoy_checks"),
)
"""Modules with checks."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong."""

    id: str
    severity: Severity
    where: str
    """The endpoint, file or address that it is about."""
    evidence: str
    """What was seen, not what it may mean."""
    fix: str
    """What to write where."""


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """One check that was made, or why not."""

    id: str
    title: str
    ok: bool | None
    """None: skipped."""
    skipped: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an examination came to. The JSON form is stable: fields are added, never renamed."""

    findings: list[Finding]
    checks: list[Checked]


Judge = Callable[[Facts], Iterable[Finding]]
Needs = Callable[[Facts], str]
"""Why a check cannot be made with these facts; empty where it can."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A registered check."""

    id: str
    title: str
    finds: dict[str, Severity]
    judge: Judge
    needs: Needs


_registry: dict[str, Check] = {}


def check(id: str, title: str, finds: dict[str, Severity], needs: Needs = lambda facts: "") -> Callable[[Judge], Judge]:
    """Register a check. `finds`: the ids of its findings and how bad each is."""

    def register(judge: Judge) -> Judge:
        if id in _registry:
            raise ValueError(f"two checks named {id!r}")
        _registry[id] = Check(id=id, title=title, finds=finds, judge=judge, needs=needs)
        return judge

    return register


def checks() -> list[Check]:
    """All checks, in the order in which one would look: the engines first, what stands in front of them last."""
    return sorted(_registry.values(), key=lambda it: AREAS.index(it.judge.__module__.rpartition(".")[2]))


def severities() -> dict[str, Severity]:
    """Every finding id there is, with its severity."""
    return {id: severity for it in _registry.values() for id, severity in it.finds.items()}


def found(id: str, where: str, evidence: str, fix: str) -> Finding:
    """A finding of a registered id."""
    return Finding(id=id, severity=severities()[id], where=where, evidence=evidence, fix=fix)


def judge(facts: Facts) -> Report:
    """All checks over these facts. A fault that two checks see in one place is reported once."""
    findings: dict[tuple[str, str], Finding] = {}
    checked: list[Checked] = []
    for it in checks():
        if reason := it.needs(facts):
            checked.append(Checked(id=it.id, title=it.title, ok=None, skipped=reason))
            continue
        seen = list(it.judge(facts))
        for finding in seen:
            findings.setdefault((finding.id, finding.where), finding)
        checked.append(Checked(id=it.id, title=it.title, ok=not seen))
    ranked = sorted(findings.values(), key=lambda finding: finding.severity != "error")
    return Report(findings=ranked, checks=checked)


def pairs(items: Iterable[Finding]) -> Iterator[tuple[str, str]]:
    """(id, where) of findings: what tests compare."""
    return ((finding.id, finding.where) for finding in items)
