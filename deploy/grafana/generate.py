"""Write the dashboards as Grafana takes them: `python -m deploy.grafana.generate` (add --check to only compare).

One JSON file per dashboard, importable by hand or by provisioning, with variables for the data source and the gateway.
"""

import json
import sys
from pathlib import Path
from typing import Any

from deploy.grafana.dashboards import DASHBOARDS
from deploy.grafana.panel import Dashboard, Panel

FOLDER = Path(__file__).resolve().parent
WIDTH = 24
HEIGHT = {"timeseries": 8, "stat": 5, "table": 8}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(it: Dashboard) -> dict[str, Any]:
    """The dashboard's JSON."""
    panels: list[dict[str, Any]] = []
    x = y = height = 0
    for number, panel in enumerate(it.panels, 1):
        if x + panel.width > WIDTH:
            x, y, height = 0, y + height, 0
        panels.append(_panel(number, panel, x, y))
        x += panel.width
        height = max(height, HEIGHT[panel.kind])
    return {
        "uid": it.uid,
        "title": it.title,
        "description": it.text,
        "tags": ["warmroute", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), _instance()]},
        "links": [
            {"type": "dashboards", "title": "Warmroute", "tags": ["warmroute"], "asDropdown": True, "keepTime": True}
        ],
        "panels": panels,
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _instance() -> dict[str, Any]:
    query = "label_values(warmroute_build_info, instance)"
    return {
        "name": "instance",
        "label": "Gateway",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "instance"},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    instant = panel.kind == "table"
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 40 if panel.stacked else 8, "stacking": stacking}
    text = panel.text + (f" (Empty while {panel.quiet}.)" if panel.quiet else "")
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": text.strip(),
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT[panel.kind]},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
                **({"format": "table"} if instant else {}),
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case "stat":
            calculated = "mean" if panel.unit == "percentunit" else "lastNotNull"
            return {"reduceOptions": {"calcs": [calculated]}, "graphMode": "area", "colorMode": "value"}
        case "table":
            return {"showHeader": True}
        case _:
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }


def files() -> dict[Path, str]:
    """Every file and its text."""
    return {FOLDER / f"{it.uid}.json": json.dumps(dashboard(it), indent=2) + "\n" for it in DASHBOARDS}


def main(arguments: list[str]) -> int:
    """Write, or with --check say which files are not current; the exit status."""
    stale = [path for path, text in files().items() if not path.is_file() or path.read_text() != text]
    if arguments == ["--check"]:
        for path in stale:
            print(f"{path} is not current; run: python -m deploy.grafana.generate", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(files()[path])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
