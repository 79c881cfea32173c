"""docs/alerts.md from rules.yaml: `python -m deploy.prometheus.alert_page` (add --check to only compare)."""

import sys
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).resolve().parent / "rules.yaml"
PAGE = RULES.parents[2] / "docs" / "alerts.md"
HEAD = """# Alerts

Generated from [deploy/prometheus/rules.yaml](../deploy/prometheus/rules.yaml); do not edit. Each alert with what raises it and
what to do. Whenever the picture itself is in doubt, `warmroute doctor -c FILE` names the broken wire
([troubleshooting](troubleshooting.md)).

"""


def page() -> str:
    """The Markdown page."""
    parts = [HEAD]
    recorded: list[dict[str, Any]] = []
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                parts.append(_alert(rule))
            else:
                recorded.append(rule)
    parts.append("## Recorded series\n\n")
    parts += [f"`{rule['record']}`\n\n```promql\n{rule['expr'].strip()}\n```\n\n" for rule in recorded]
    return "".join(parts).rstrip() + "\n"


def _alert(rule: dict[str, Any]) -> str:
    notes = rule["annotations"]
    link = notes["runbook_url"].removeprefix("docs/")
    lasting = f", for {rule['for']}" if "for" in rule else ""
    return (
        f"## {rule['alert']}\n\n{rule['labels']['severity']}{lasting}. {notes['description']}\n\n{notes['runbook']} "
        f"See [{link}]({link}).\n\n```promql\n{rule['expr'].strip()}\n```\n\n"
    )


def main(arguments: list[str]) -> int:
    """Write, or with --check say whether the page is current; the exit status."""
    current = PAGE.is_file() and PAGE.read_text() == page()
    if arguments == ["--check"]:
        if not current:
            print(f"{PAGE} is not current; run: python -m deploy.prometheus.alert_page", file=sys.stderr)
        return 0 if current else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
