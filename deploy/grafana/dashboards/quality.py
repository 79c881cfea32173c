"""Routing quality: how much is reused, how much could be, are predictions right."""

from deploy.grafana.panel import EXACT_PREDICTIONS, Dashboard, Panel, by, mean, quantile, rate, series

QUALITY = Dashboard(
    uid="warmroute-quality",
    title="Warmroute / Routing quality",
    text="How much of the prompts is reused, how much could be, and are predictions right?",
    panels=(
        Panel(
            title="Match share: best, chosen, reused",
            queries=((mean("match_fraction", by_labels="which"), "{{which}}"),),
            unit="percentunit",
            top=1,
            width=12,
            text="best above chosen: load overrules affinity. chosen above reused: the picture is wrong.",
        ),
        Panel(
            title="Why endpoints were chosen",
            queries=((by("reason", rate("decisions_total")), "{{reason}}"),),
            unit="reqps",
            stacked=True,
            width=12,
            text="nothing_cached alone, under chat traffic, is the signature of a broken wire.",
        ),
        Panel(
            title="Reused share by endpoint",
            queries=((mean("match_fraction", 'which="reused"', "endpoint"), "{{endpoint}}"),),
            unit="percentunit",
            top=1,
        ),
        Panel(
            title="Requests by endpoint",
            queries=((by("endpoint", rate("decisions_total")), "{{endpoint}}"),),
            unit="reqps",
            text="One endpoint with nearly all of it: scores have collapsed onto it.",
        ),
        Panel(
            title="Predictions that were exact",
            queries=((EXACT_PREDICTIONS, "exact"),),
            unit="percentunit",
            top=1,
            text="Predicted cached tokens against what the engine reported.",
        ),
        Panel(
            title="Prediction error",
            queries=((mean("cached_tokens_error", by_labels="direction"), "{{direction}}"),),
            text="Mean absolute difference in tokens. over: the engine had less than the index said.",
        ),
        Panel(
            title="Prediction error by endpoint, p95",
            queries=((quantile(0.95, "cached_tokens_error", by_labels="endpoint"), "{{endpoint}}"),),
            text="Tokens.",
        ),
        Panel(
            title="Cached tokens not reported",
            queries=((by("endpoint", rate("cached_tokens_unreported_total")), "{{endpoint}}"),),
            unit="reqps",
            text="Start engines with --enable-prompt-tokens-details.",
            quiet="all engines report cached tokens",
        ),
        Panel(
            title="Time to first token by endpoint, p95",
            queries=((quantile(0.95, "time_to_first_token_seconds", by_labels="endpoint"), "{{endpoint}}"),),
            unit="s",
        ),
        Panel(
            title="Prompt length",
            queries=tuple((quantile(q, "prompt_tokens"), f"p{int(q * 100)}") for q in (0.5, 0.95)),
            text="Tokens.",
        ),
        Panel(
            title="Cached tokens predicted, median",
            queries=((quantile(0.5, "match_tokens", by_labels="which"), "{{which}}"),),
            text="Tokens, on the best endpoint and on the chosen one.",
        ),
        Panel(
            title="Models whose template rewrites history",
            queries=((f"max by (model) ({series('template_rewrites_history')})", "{{model}}"),),
            kind="table",
            text="1: replies cannot be reused. `warmroute template` shows where and why.",
        ),
        Panel(
            title="Plugins that failed",
            queries=((by("plugin", rate("plugin_errors_total")), "{{plugin}}"),),
            unit="ops",
            quiet="no plugin raised",
        ),
    ),
)
