"""A report for people: the checked list, then each finding with its evidence and its fix."""

from collections.abc import Iterator

from gateway.doctor.findings import PAGE, Report

MARKS = {True: "ok     ", False: "FOUND  ", None: "skipped"}


def report_text(report: Report) -> str:
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    skipped: dict[str, list[str]] = {}
    for checked in report.checks:
        if checked.ok is None:
            skipped.setdefault(checked.skipped, []).append(checked.title)
        else:
            yield f"{MARKS[checked.ok]}  {checked.title}"
    for reason, titles in skipped.items():
        yield f"{MARKS[None]}  {'; '.join(titles)}"
        yield f"         because: {reason}"
    for finding in report.findings:
        yield ""
        yield f"{finding.severity}: {finding.id}: {finding.where}"
        yield f"  seen  {finding.evidence}"
        yield f"  fix   {finding.fix}"
        yield f"  more  {PAGE}#{finding.id}"
    yield ""
    count = len(report.findings)
    found = "no findings" if not count else "1 finding" if count == 1 else f"{count} findings"
    left = sum(map(len, skipped.values()))
    missing = "1 check was" if left == 1 else f"{left} checks were"
    yield f"{found}, but {missing} skipped" if left else found
