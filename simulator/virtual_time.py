"""Drive an engine in virtual time: arrivals in, outcomes out, no clock and no sockets."""

from collections.abc import Iterable, Iterator

from simulator.engine import Engine
from simulator.sequence import Submission
from simulator.step import Outcome, Step


def run(
    engine: Engine, arrivals: Iterable[tuple[float, Submission]], start: float = 0.0
) -> Iterator[tuple[Step, Outcome]]:
    """Feed `arrivals` (seconds, in order) and yield each step with what was true at its end.

    A request that arrives during a step is scheduled by the next one. Between two yields the caller may submit more.
    """
    pending = iter(arrivals)
    upcoming = next(pending, None)
    now = start
    while True:
        while upcoming is not None and upcoming[0] <= now:
            engine.submit(upcoming[1], upcoming[0])
            upcoming = next(pending, None)
        step = engine.begin_step(now)
        if step is None:
            if upcoming is None:
                return
            now = max(now, upcoming[0])
            continue
        now = step.ends
        yield step, engine.finish_step(step)
