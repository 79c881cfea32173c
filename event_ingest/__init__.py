"""From an engine's event stream to the index: wire formats, sequence, re-blocking, sockets."""
