"""Keeps Python's garbage collector from stopping the gateway.

A full collection looks at every object that could be part of a cycle and stops all threads meanwhile: 0.1 s for what the
imports alone leave behind, and whatever a decision costs waits. What is there when the gateway begins to serve stays until it
ends, so it is put out of the collector's sight; what grows with the fleet (`event_ingest.chain`, `indexer`) is never in it.
"""

import gc


def settle() -> None:
    """Collect now, and never look at the rest again until the next call: after the start, and after a reload, which leaves
    old tokenizers behind. Takes as long as one full collection."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
