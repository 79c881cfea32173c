"""Draw the dashboards for the docs: `python -m deploy.grafana.render --seconds 240`.

A trial fleet works under changing load, its Prometheus is asked every panel's query, and headless Chromium takes a picture of
a page that plots the answers (page.html: no network, inline SVG). Not Grafana, but its panels, queries and grid.
"""

import argparse
import asyncio
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from deploy.grafana.dashboards import DASHBOARDS
from deploy.grafana.generate import HEIGHT
from deploy.grafana.panel import Dashboard, Panel
from deploy.grafana.trial import Trial, trial
from gateway.demo_traffic import Shape

HERE = Path(__file__).resolve().parent
IMAGES = HERE.parents[1] / "docs" / "images"
WIDTH = 1240
POINTS = 90
CHROMIUM = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--force-device-scale-factor=1",
    ),
)


async def collect(running: Trial, it: Dashboard, start: float, end: float) -> dict[str, Any]:
    """The data of a dashboard's page."""
    panels = [await _panel(running, panel, start, end) for panel in it.panels]
    return {"title": it.title, "text": it.text, "range": [start, end], "panels": panels}


async def _panel(running: Trial, panel: Panel, start: float, end: float) -> dict[str, Any]:
    names = await _names(running)
    series: list[dict[str, Any]] = []
    for number, (query, legend) in enumerate(panel.queries):
        query = query.replace("$__rate_interval", "15s").replace("$instance", ".*")
        for found in await running.ask_range(query, start, end, (end - start) / POINTS):
            labels = found["metric"]
            name = re.sub(r"{{(\w+)}}", lambda match, of=labels: str(of.get(match[1], "")), legend)
            for address, endpoint in names.items():
                name = name.replace(address, endpoint)
            points = [(float(at), float(value)) for at, value in found["values"]]
            clean = [(at, value if math.isfinite(value) else None) for at, value in points]
            if any(value is not None for _, value in clean):
                series.append({"name": name or "value", "points": clean, "query": number})
    series.sort(key=lambda it: (it["query"], it["name"]))
    shown = {"title": panel.title, "unit": panel.unit, "kind": panel.kind, "width": panel.width, "top": panel.top}
    return {**shown, "stacked": panel.stacked, "quiet": panel.quiet, "series": series}


async def _names(running: Trial) -> dict[str, str]:
    found = await running.ask("warmroute_endpoint_info")
    return {sample["metric"]["endpoint"]: sample["metric"]["name"] for sample in found}


def draw(page: dict[str, Any], picture: Path) -> None:
    """Let Chromium draw the page; its height follows from the grid."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("needs chromium (Debian package chromium)")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        text = (HERE / "page.html").read_text().replace("/*DATA*/null", json.dumps(page).replace("</", "<\\/"))
        file.write_text(text)
        window = f"--window-size={WIDTH},{_height(page)}"
        command = [chromium, *CHROMIUM, f"--user-data-dir={folder}/profile", window, f"--screenshot={picture}"]
        subprocess.run([*command, f"file://{file}"], check=True, capture_output=True, timeout=180)


def _height(page: dict[str, Any]) -> int:
    height, row, used = 66, 0, 0
    for panel in page["panels"]:
        if used + panel["width"] > 24:
            height, row, used = height + row + 8, 0, 0
        used += panel["width"]
        row = max(row, 82 if HEIGHT[panel["kind"]] == 5 else 166)
    return height + row + 14


async def pages(seconds: float) -> list[tuple[str, dict[str, Any]]]:
    """Run a trial and collect all pages: a quiet beginning, a burst, and a calm end."""
    with tempfile.TemporaryDirectory() as folder:
        async with trial(Path(folder)) as running:
            start = time.time()
            calm = Shape(requests=int(seconds), turns=5, groups=4, spread_s=seconds * 0.8, pause_s=2.0)
            burst = Shape(requests=int(seconds * 0.7), turns=4, groups=4, spread_s=seconds * 0.2, pause_s=1.5, seed=8)

            async def later() -> None:
                await asyncio.sleep(seconds * 0.4)
                await running.traffic(burst)

            async with asyncio.TaskGroup() as group:
                group.create_task(running.traffic(calm))
                group.create_task(later())
            await asyncio.sleep(3)
            end = time.time()
            return [(it.uid, await collect(running, it, start, end)) for it in DASHBOARDS]


def main() -> int:
    """Draw all four; their paths go to standard output."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=240.0, help="length of the trial")
    arguments.add_argument("--out", type=Path, default=IMAGES)
    arguments.add_argument("--data", type=Path, help="keep the collected data here, or draw it again if it is there")
    given = arguments.parse_args()
    if given.data is not None and given.data.is_file():
        drawn = json.loads(given.data.read_text())
    else:
        drawn = asyncio.run(pages(given.seconds))
        if given.data is not None:
            given.data.write_text(json.dumps(drawn))
    given.out.mkdir(parents=True, exist_ok=True)
    for uid, page in drawn:
        picture = given.out / f"{uid}.png"
        draw(page, picture)
        print(f"{picture} {picture.stat().st_size // 1024} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
