"""Prefill and decode: what is computed elsewhere, and do hand-offs arrive."""

from deploy.grafana.panel import Dashboard, Panel, by, per_role, quantile, rate, series, share

DISAGGREGATED = share("decider_decisions_total", 'outcome="disaggregate"', "decider_decisions_total")

STAGES = Dashboard(
    uid="warmroute-stages",
    title="Warmroute / Prefill and decode",
    text="Which prompts are computed elsewhere, does it pay, and do the hand-offs arrive?",
    panels=(
        Panel(
            title="Prompts computed elsewhere",
            queries=((DISAGGREGATED, "share"),),
            unit="percentunit",
            kind="stat",
        ),
        Panel(
            title="Decisions",
            queries=((by("outcome", rate("decider_decisions_total")), "{{outcome}}"),),
            unit="reqps",
            stacked=True,
            text="disaggregate: a prefill endpoint computes the prompt. local: the decode endpoint does.",
        ),
        Panel(
            title="Decisions by reason",
            queries=((by("reason", rate("decider_decisions_total")), "{{reason}}"),),
            unit="reqps",
            text="The deciders' reasons are in docs/plugins.md.",
        ),
        Panel(
            title="Hand-offs",
            queries=((by("outcome, reason", rate("handoffs_total")), "{{outcome}} {{reason}}"),),
            unit="reqps",
            text="By the gateway itself (handoff.mode gateway). local: prefill work was wasted.",
        ),
        Panel(
            title="Time of prefill legs",
            queries=tuple((quantile(q, "prefill_leg_seconds"), f"p{int(q * 100)}") for q in (0.5, 0.95)),
            unit="s",
            text="Near warmroute.handoff.timeout: the prefill pool is too small.",
        ),
        Panel(
            title="Time to first token by role, p95",
            queries=(
                (
                    "histogram_quantile(0.95, sum by (le, role) (sum by (instance, endpoint, le) "
                    f"({rate('time_to_first_token_seconds_bucket')}) * on (instance, endpoint) group_left (role) "
                    f"max by (instance, endpoint, role) ({series('endpoint_info')})))",
                    "{{role}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            title="Requests in flight by role",
            queries=((per_role("endpoint_in_flight"), "{{role}}"),),
        ),
        Panel(
            title="Uncached tokens in flight by role",
            queries=((per_role("endpoint_in_flight_tokens"), "{{role}}"),),
            text="On decode endpoints: prompts that were not handed off.",
        ),
        Panel(
            title="Waiting by role",
            queries=((per_role("endpoint_waiting"), "{{role}}"),),
            text="One role with a queue and the other without: the ratio of the pools is off.",
        ),
        Panel(
            title="KV cache in use by role, mean",
            queries=((f"{per_role('endpoint_kv_usage')} / count by (role) ({series('endpoint_info')})", "{{role}}"),),
            unit="percentunit",
            top=1,
        ),
        Panel(
            title="Endpoints up by role",
            queries=((per_role("endpoint_up"), "{{role}}"),),
        ),
    ),
)
