"""Dashboards and rules against a real Prometheus that scrapes a real gateway under traffic."""

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from deploy.grafana import generate
from deploy.grafana.dashboards import DASHBOARDS
from deploy.grafana.trial import RULES, Trial, find_prometheus, trial
from deploy.prometheus import alert_page
from gateway.compatibility_names import ROWS
from gateway.demo_traffic import Shape
from gateway.envoy_binary import EnvoyNotFoundError
from gateway.metric_docs import definitions

RATE_INTERVAL = "30s"
QUIET_RULES = {
    "warmroute:routed_blind:ratio5m": "every prompt is tokenized",
    "warmroute:handoffs_local:ratio5m": "may have no hand-off that came to nothing",
}
"""Recording rules without data in a healthy run, and why. Alerting rules have none by design."""
QUIET_COMPATIBLE = {
    "flow_control_requests_total": "nobody waits",
    "flow_control_request_queue_duration_seconds": "nobody waits",
}
SUFFIXES = ("_bucket", "_sum", "_count")


def expanded(query: str) -> str:
    """A panel's query as Grafana sends it."""
    return query.replace("$__rate_interval", RATE_INTERVAL).replace("$instance", ".*")


def metrics_in(query: str) -> set[str]:
    """Names of our metrics in a query, without the parts of a histogram."""
    names = set(re.findall(r"\bwarmroute_[a-z_]+", query))
    known = {definition.name for definition in definitions()}
    return {name if name in known else re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def test_the_written_dashboards_are_current() -> None:
    assert [path.name for path, text in generate.files().items() if path.read_text() != text] == []


def test_dashboards_have_different_names_and_every_panel_fits_the_grid() -> None:
    assert len({it.uid for it in DASHBOARDS}) == len({it.title for it in DASHBOARDS}) == 4
    for it in DASHBOARDS:
        places: set[tuple[int, int]] = set()
        for panel in generate.dashboard(it)["panels"]:
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= generate.WIDTH
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not cells & places, panel["title"]
            places |= cells


def test_panels_and_rules_ask_for_metrics_that_exist() -> None:
    known = {definition.name for definition in definitions()}
    for it in DASHBOARDS:
        for panel in it.panels:
            for query, _ in panel.queries:
                assert metrics_in(query) <= known, panel.title
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    for rule in rules:
        assert metrics_in(rule["expr"]) <= known, rule


async def run(*command: str | Path) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


@pytest.fixture(scope="module")
def promtool() -> Path:
    tools = find_prometheus()
    if tools is None:
        pytest.skip("needs prometheus and promtool on PATH or in the folder WARMROUTE_PROMETHEUS")
    return tools[1]


async def test_promtool_takes_the_rules_and_their_unit_tests_pass(promtool: Path) -> None:
    status, output = await run(promtool, "check", "rules", RULES)
    assert status == 0, output
    status, output = await run(promtool, "test", "rules", RULES.with_name("rules_test.yaml"))
    assert status == 0, output


def test_every_alert_is_unit_tested_and_has_a_runbook_that_exists() -> None:
    docs = RULES.parents[2]
    tested = RULES.with_name("rules_test.yaml").read_text()
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            if "alert" not in rule:
                continue
            assert rule["alert"] in tested, rule["alert"]
            assert {"summary", "description", "runbook", "runbook_url"} <= rule["annotations"].keys(), rule["alert"]
            file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
            if (docs / file).is_file():
                assert anchor in anchors((docs / file).read_text()), f"{rule['alert']}: {file}#{anchor}"


def test_the_page_of_alerts_is_current() -> None:
    assert alert_page.PAGE.read_text() == alert_page.page()


def anchors(page: str) -> set[str]:
    """Anchors of a Markdown page: its headings, and ids written out."""
    headings = re.findall(r"^#+ (.+)$", page, re.M)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a (?:id|name)="([^"]+)"', page))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory, promtool: Path) -> AsyncIterator[Trial]:
    """The fleet after half a minute of chats."""
    try:
        async with trial(tmp_path_factory.mktemp("trial")) as running:
            observations = await running.traffic(Shape(requests=40, turns=4, groups=3, spread_s=6.0, pause_s=1.0))
            assert [it.error for it in observations if it.error] == []
            await asyncio.sleep(4)  # the last scrapes and rule evaluations
            yield running
    except EnvoyNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.envoy
@pytest.mark.asyncio(loop_scope="module")
async def test_every_panel_shows_data(watched: Trial) -> None:
    empty, wrong = [], []
    for it in DASHBOARDS:
        for panel in it.panels:
            for query, legend in panel.queries:
                try:
                    found = await watched.ask(expanded(query))
                except ValueError as error:
                    wrong.append(f"{panel.title}: {error}")
                    continue
                numbers = [sample for sample in found if sample["value"][1] != "NaN"]
                if not numbers and not panel.quiet:
                    empty.append(f"{it.title} / {panel.title}: {expanded(query)}")
                for name in re.findall(r"{{(\w+)}}", legend):
                    assert all(name in sample["metric"] for sample in found), (panel.title, name)
    assert wrong == []
    assert empty == []


@pytest.mark.envoy
@pytest.mark.asyncio(loop_scope="module")
async def test_every_rule_is_evaluated_and_none_fires_in_a_healthy_fleet(watched: Trial) -> None:
    async def rules_now() -> list[dict[str, Any]]:
        return [rule for group in (await watched.get("rules"))["data"]["groups"] for rule in group["rules"]]

    rules = await rules_now()
    for _ in range(120):  # a group is evaluated for the first time somewhere within its interval
        if all(rule["health"] != "unknown" for rule in rules):
            break
        await asyncio.sleep(0.5)
        rules = await rules_now()
    assert len(rules) == sum(len(group["rules"]) for group in yaml.safe_load(RULES.read_text())["groups"])
    assert [(rule["name"], rule["health"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule["type"] == "alerting" and rule["state"] == "firing"] == []
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording" and rule["name"] not in QUIET_RULES]
    assert recorded
    for name in recorded:
        # The recording group runs every 30 s; its expression must have data now.
        expression = next(rule["query"] for rule in rules if rule["name"] == name)
        assert await watched.ask(expression), name


@pytest.mark.envoy
@pytest.mark.asyncio(loop_scope="module")
async def test_llmds_names_have_data_and_promtool_finds_nothing_to_say(watched: Trial) -> None:
    for row in ROWS:
        if row.name in QUIET_COMPATIBLE:
            continue
        name = row.full + ("_count" if row.kind == "histogram" else "")
        assert await watched.ask(name), name
    decided = await watched.ask("sum by (decision_type) (llm_d_epp_pd_decision_total)")
    assert {sample["metric"]["decision_type"] for sample in decided} == {"prefill-decode", "decode-only"}
    assert await watched.ask("llm_d_epp_kv_cache_index_admissions_total > 0")
    assert await watched.ask("llm_d_epp_kv_cache_index_lookup_hits_total > 0")
    running = await watched.ask("sum(llm_d_epp_request_running)")
    assert running[0]["value"][1] == "0"


@pytest.mark.envoy
@pytest.mark.asyncio(loop_scope="module")
async def test_metrics_that_agree_agree(watched: Trial) -> None:
    """The same requests counted in different places come to the same number."""

    async def number(query: str) -> float:
        found = await watched.ask(query, time.time())
        return float(found[0]["value"][1]) if found else 0.0

    routed = await number('sum(warmroute_requests_total{outcome="routed"})')
    assert routed >= 45
    assert await number("sum(warmroute_decisions_total)") == routed
    assert await number("sum(warmroute_responses_total)") == routed
    refused = await number('sum(warmroute_requests_total{outcome="400"})')
    assert await number("sum(llm_d_epp_request_total)") == routed + refused
    assert await number('sum(warmroute_media_prompts_total{outcome="image_refused"})') == refused > 0
    assert await number("sum(warmroute_request_hints_total)") == routed
    placed = await number("sum(warmroute_burst_assigned_total)")
    assert await number('sum(warmroute_burst_group_requests_count{which="alike"})') == placed
    assert await number('sum(warmroute_burst_wait_seconds_count{outcome=~"colocated|separated"})') == placed > 0
    assert await number("sum(warmroute_burst_window_requests_sum)") == await number(
        "sum(warmroute_burst_wait_seconds_count)"
    )
    assert await number('sum(warmroute_books_total{event="reserved"})') >= routed
    assert await number("sum(warmroute_books_open)") == 0
    chosen = await number('sum(warmroute_match_fraction_sum{which="chosen"})')
    best = await number('sum(warmroute_match_fraction_sum{which="best"})')
    assert 0 < chosen <= best + 1e-9
    assert await number('count({__name__=~"warmroute_.+", endpoint!=""})') / 4 < 150  # docs/monitoring.md: about 120


@pytest.mark.envoy
@pytest.mark.asyncio(loop_scope="module")
async def test_top_shows_every_endpoint_and_the_last_decisions(watched: Trial) -> None:
    top = (sys.executable, "-c", "from gateway.cli import main; main()", "top", "--once", "--json")
    status, output = await run(*top, "--admin", watched.admin)
    assert status == 0, output
    frame = json.loads(output)
    assert {it["role"] for it in frame["endpoints"]} == {"prefill", "decode"}
    assert all(it["trust"] == "exact" for it in frame["endpoints"])
    assert any(it["match_share"] for it in frame["endpoints"])
    assert any(it["prefill"] for it in frame["decisions"])
    status, output = await run(*top, "--metrics", watched.target)
    assert status == 0, output
    assert [it["name"] for it in json.loads(output)["endpoints"]] == [it["name"] for it in frame["endpoints"]]
