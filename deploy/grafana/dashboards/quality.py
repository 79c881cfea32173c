"""Routing quality: how much is reused, how much could be, are predictions right."""

from deploy.grafana.panel import EXACT_PREDICTIONS, Dashboard, Panel, by, mean, quantile, rate, series, share

BEST, CHOSEN = 'which="best"', 'which="chosen"'
GIVEN_UP = f"{mean('match_tokens', BEST)} - {mean('match_tokens', CHOSEN)}"

QUALITY = Dashboard(
    uid="warmroute-quality",
    title="Warmroute / Routing quality",
    text="How much of the prompts is reused, how much could be, are predictions right, and do images, bursts and hints work?",
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
            title="Prompts with images",
            queries=((by("source, outcome", rate("media_prompts_total")), "{{source}} {{outcome}}"),),
            unit="reqps",
            stacked=True,
            text="By who read them and how far. named: matched to the end. image_refused: answered 400. image_model or unnamed: "
            "the router is not told how the engines take images. The rest depends on what clients send: docs/tokenization.md.",
        ),
        Panel(
            title="Images",
            queries=((by("outcome", rate("tokenizer_images_total")), "{{outcome}}"),),
            unit="ops",
            text="known: seen before, costs next to nothing. Far more read than known in chats: clients encode an image anew "
            "every turn, and engines compute it anew, too. unreadable: see docs/tokenization.md for formats and limits.",
        ),
        Panel(
            title="Tokens of a prompt's images",
            queries=tuple((quantile(q, "media_prompt_tokens"), f"p{int(q * 100)}") for q in (0.5, 0.95)),
            text="Where images have their places. A step without a change of clients: minPixels and maxPixels, or another "
            "preprocessor_config.json; where engines count differently, predictions fall short (prediction error: under).",
        ),
        Panel(
            title="Requests per burst window, mean",
            queries=((mean("burst_window_requests", by_labels="ended"), "{{ended}}"),),
            text="By how the window ended. About 1: there are no bursts, take the burst-prefix-cache-producer out. full all the "
            "time: maxBatchSize cuts bursts in pieces. Empty without that producer, like all panels of bursts.",
        ),
        Panel(
            title="Size of burst groups, mean",
            queries=((mean("burst_group_requests", by_labels="which"), "{{which}}"),),
            text="As a request sees it: how many of its window begin alike, and how many of those it shares the endpoint with. "
            "together far below alike: maxPerReplica or the balance splits groups, and their prefix is computed once per part.",
        ),
        Panel(
            title="Requests held for bursts",
            queries=((by("outcome", rate("burst_wait_seconds_count")), "{{outcome}}"),),
            unit="reqps",
            stacked=True,
            text="Mostly alone: the window only costs time. Take it out, or call prompts alike earlier (minColocateBlocks, "
            "maxPrefixTokensToMatch). failed: the log's burst_failed has the error. no_endpoint: endpoints went away meanwhile.",
        ),
        Panel(
            title="Wait in a burst window, p95",
            queries=((quantile(0.95, "burst_wait_seconds", by_labels="outcome"), "{{outcome}}"),),
            unit="s",
            text="At most windowDurationMs (by the histogram's steps it may look like twice that), and part of the time to first "
            "token. Far above it: the gateway has too little CPU.",
        ),
        Panel(
            title="Waiting in burst windows",
            queries=((f"sum({series('burst_waiting')})", "waiting"),),
            text="Bodies that are held in memory. In the thousands: set maxBatchSize or a shorter windowDurationMs.",
        ),
        Panel(
            title="Burst assignments followed",
            queries=((share("burst_assigned_total", 'followed="yes"', "burst_assigned_total"), "followed"),),
            unit="percentunit",
            top=1,
            text="Requests whose prompt is computed where their window wanted it. Falling: other scorers weigh more; give the "
            "prefix-cache-scorer that reads the burst producer more weight.",
        ),
        Panel(
            title="Hints to engines",
            queries=((by("plugin, outcome", rate("request_hints_total")), "{{plugin}} {{outcome}}"),),
            unit="reqps",
            text="Whether an engine is told where to pull KV blocks from. Never named while tokens are given up for load (beside "
            "this): streams are not exact, or minCachedTokenDelta is too high. no_match: see routed by load only. Empty without "
            "a p2p-source-producer.",
        ),
        Panel(
            title="Cached tokens given up for load, mean",
            queries=((GIVEN_UP, "tokens"),),
            text="What the best endpoint had more than the chosen one, per request. High and no hints named: these tokens are "
            "computed again. Let load weigh less, or engines pull blocks (p2p-source-producer).",
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
