"""How the interpreter is set, so that nothing in the process keeps a decision waiting.

Garbage: a full collection looks at every object that could be part of a cycle and stops all threads meanwhile: 0.1 s for what
the imports alone leave behind. What is there when the gateway begins to serve stays until it ends, so it is put out of the
collector's sight; what grows with the fleet (`event_ingest.chain`, `indexer`) is never in it.

Threads: the event loop gives the interpreter away with every system call, and gets it back from a thread that computes (a
replay of thousands of batches, say) only after the switch interval. Python's 5 ms, several times per request, are longer than
the request.
"""

import gc
import sys

SWITCH_S = 0.0005


def share() -> None:
    """Let the event loop wait for another thread no longer than SWITCH_S."""
    sys.setswitchinterval(SWITCH_S)


def settle() -> None:
    """Collect now, and never look at the rest again until the next call: after the start, and after a reload, which leaves
    old tokenizers behind. Takes as long as one full collection."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
