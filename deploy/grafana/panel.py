"""The vocabulary of the dashboards: panels as data, and the forms of PromQL that they are made of."""

import dataclasses

Query = tuple[str, str]
"""PromQL and legend. `RANGE` stands for Grafana's rate interval, `SELECT` for the chosen gateways."""

RANGE = "$__rate_interval"
SELECT = 'instance=~"$instance"'
STATE_EXACT = 'state="exact"'
STATE_INEXACT = 'state!="exact"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel. Grafana's grid is 24 wide; a row of the dashboard is 8 high."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    text: str = ""
    """What it means, and what to do when it looks wrong."""
    kind: str = "timeseries"
    """timeseries, stat or table."""
    width: int = 8
    top: float | None = None
    """Upper end of the axis."""
    stacked: bool = False
    quiet: str = ""
    """Why the query returns nothing where all is well; every other panel must show data in the tests."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    text: str
    panels: tuple[Panel, ...]


def series(name: str, labels: str = "") -> str:
    """A selector for the chosen gateways."""
    return f"warmroute_{name}{{{SELECT}{', ' + labels if labels else ''}}}"


def rate(name: str, labels: str = "") -> str:
    return f"rate({series(name, labels)}[{RANGE}])"


def by(labels: str, expression: str) -> str:
    return f"sum by ({labels}) ({expression})"


def quantile(q: float, name: str, labels: str = "", by_labels: str = "") -> str:
    """Of a histogram, over all labels but `by_labels`."""
    kept = f"le, {by_labels}" if by_labels else "le"
    return f"histogram_quantile({q}, sum by ({kept}) ({rate(name + '_bucket', labels)}))"


def mean(name: str, labels: str = "", by_labels: str = "") -> str:
    """Of a histogram."""
    over = f" by ({by_labels})" if by_labels else ""
    return f"sum{over} ({rate(name + '_sum', labels)}) / sum{over} ({rate(name + '_count', labels)})"


def per_role(name: str) -> str:
    """A gauge of endpoints, summed by role."""
    joined = f"on (instance, endpoint, rank) group_left (role) {series('endpoint_info')}"
    return f"sum by (role) ({series(name)} * {joined})"


def share(name: str, labels: str, of: str) -> str:
    """What part the series with these labels have of all."""
    return f"sum({rate(name, labels)}) / sum({rate(of)})"


EXACT_PREDICTIONS = share("cached_tokens_error_bucket", 'le="0.0"', "cached_tokens_error_count")
