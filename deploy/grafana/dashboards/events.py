"""The event plane: which caches are known, how well, what was lost."""

from deploy.grafana.panel import RANGE, STATE_INEXACT, Dashboard, Panel, by, rate, series

INEXACT_STREAMS = f"{series('stream_trust', STATE_INEXACT)} == 1"

EVENTS = Dashboard(
    uid="warmroute-events",
    title="Warmroute / Event plane",
    text="Which engines' caches does the router know, how well, and what was lost on the way?",
    panels=(
        Panel(
            title="Streams by trust",
            queries=((by("state", series("stream_trust")), "{{state}}"),),
            stacked=True,
            text="Everything but exact has a reason, listed beside this.",
        ),
        Panel(
            title="Streams that are not exact",
            queries=((INEXACT_STREAMS, "{{endpoint}} {{rank}} {{state}}: {{reason}}"),),
            kind="table",
            width=16,
            text="Look the reason up in docs/events.md; `warmroute doctor` names the broken wire.",
            quiet="every stream is exact",
        ),
        Panel(
            title="Events by kind",
            queries=((by("kind", rate("events_total")), "{{kind}}"),),
            unit="ops",
            text="BlockStored and BlockRemoved, applied to the index.",
        ),
        Panel(
            title="Events by endpoint",
            queries=((by("endpoint", rate("events_total")), "{{endpoint}}"),),
            unit="ops",
            text="An endpoint that gets new prompts and stays at zero has a broken event wire.",
        ),
        Panel(
            title="Skipped events by reason",
            queries=((by("reason", rate("events_skipped_total")), "{{reason}}"),),
            unit="ops",
            text="Should be empty. The reasons are in docs/events.md.",
            quiet="no event was skipped",
        ),
        Panel(
            title="Gaps",
            queries=((f"sum by (endpoint) (increase({series('stream_gaps_total')}[{RANGE}]))", "{{endpoint}}"),),
            text="Sequence numbers that did not come: the engine's publisher dropped batches, or the network did.",
        ),
        Panel(
            title="Replays asked for",
            queries=((f"sum by (endpoint) (increase({series('stream_replays_total')}[{RANGE}]))", "{{endpoint}}"),),
            text="One when a stream is joined, then one per gap.",
        ),
        Panel(
            title="Batches",
            queries=((by("endpoint", rate("stream_batches_total")), "{{endpoint}}"),),
            unit="ops",
            text="About one per engine step that changes the cache.",
        ),
        Panel(
            title="Age of the last event",
            queries=((f"max by (endpoint) ({series('stream_last_event_age_seconds')})", "{{endpoint}}"),),
            unit="s",
            text="Long is fine for an endpoint without traffic.",
        ),
        Panel(
            title="Event lag",
            queries=((f"max by (endpoint) ({series('stream_event_lag_seconds')})", "{{endpoint}}"),),
            unit="s",
            text="Engine's time of the last batch to its being applied. Constant offsets are clocks that differ.",
        ),
        Panel(
            title="Sequence",
            queries=((f"max by (endpoint) ({series('stream_sequence')})", "{{endpoint}}"),),
            text="Falls when an engine restarts.",
        ),
        Panel(
            title="Index",
            queries=((f"sum({series('index_keys')})", "block keys"), (f"sum({series('index_entries')})", "entries")),
            text="Entries / keys is the replication of blocks over endpoints.",
        ),
        Panel(
            title="Forgotten by the index",
            queries=((by("what", rate("index_evicted_total")), "{{what}}"),),
            unit="ops",
            text="Growing: matches are too short. Raise warmroute.index.maxKeys or maxHolders.",
        ),
        Panel(
            title="Our own failures on events",
            queries=((f"sum({rate('event_errors_total')})", "messages"),),
            unit="ops",
            text="Should be zero: see the log.",
        ),
        Panel(
            title="Alarms of the gateway's own checks",
            queries=((f"max by (alarm, where) ({series('alarm')}) == 1", "{{alarm}}: {{where}}"),),
            kind="table",
            text="Look them up in docs/troubleshooting.md.",
            quiet="no alarm is on",
        ),
    ),
)
