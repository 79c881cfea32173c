"""From an engine's KV events to index entries: wire formats, the stream state machine, re-blocking, recordings."""
