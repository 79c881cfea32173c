"""The policies that are compared: configurations of the project, and readings of what others do.

A configuration is run by the project's own code. A rule stands for a product or a publication whose code is not here: it is a
reading of what is documented of it, fed from the same books and the same index, and it is as fast to react as those are.
"""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import yaml

from bench.placement.trace import BLOCK_TOKENS
from fleet.fleet import Vector
from gateway.config_document import API_VERSION, KIND

Constants = dict[str, float]
CONSTANTS: dict[str, Constants] = {"8b": {"a": 18.8e-6, "q": 8.74e-10}, "70b": {"a": 35.0e-6, "q": 5.46e-10}}
"""Model -> what its expected-work-scorer is told; those of 8b are its defaults."""
Config = Callable[[Constants, int], str]
"""(constants, seed) -> text of a configuration."""
PATIENCE = {"maxWait": "24h", "maxRequests": 1_000_000}
"""Nothing is turned away here: a policy that answers fewer requests would look better."""


class View(msgspec.Struct, frozen=True):
    """What a rule may look at, per endpoint; all of it from the router's own books and the index."""

    tokens: float
    """Of the prompt."""
    blocks: tuple[int, ...]
    """Ids of its full blocks."""
    matched: Vector
    """Its leading blocks that are cached."""
    new: Vector
    """Its tokens that are not cached; at least one."""
    queued: Vector
    """Uncached tokens of requests without a first token."""
    requests: Vector
    """Requests in flight."""
    active: Vector
    """Prompt tokens of requests in flight."""
    cache: Vector
    """Blocks in the index."""


Rule = Callable[[View], int]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A name, and either a configuration or a rule."""

    name: str
    what: str
    config: Config | None = None
    rule: Callable[[int], Rule] | None = None
    """Seed -> rule."""
    scrapes: bool = False
    """Whether it reads scraped load."""


Plugins = dict[str, dict[str, Any]]
"""Plugin type -> parameters."""


def _text(plugins: Plugins, weights: dict[str, int] | None = None) -> str:
    """A configuration of these plugins; with `weights` in one profile, else in what the project makes of them."""
    document: dict[str, Any] = {"apiVersion": API_VERSION, "kind": KIND}
    document["plugins"] = [{"type": kind, "parameters": parameters} for kind, parameters in plugins.items()]
    if weights is not None:
        refs = [{"pluginRef": name, "weight": weight} for name, weight in weights.items()]
        refs += [{"pluginRef": name} for name in plugins if name not in weights]
        document["schedulingProfiles"] = [{"name": "default", "plugins": refs}]
    return yaml.safe_dump(document)


def _picker(seed: int) -> Plugins:
    return {"max-score-picker": {"seed": seed}}


def _warmroute(order: str | None, scale: float = 1.0) -> Config:
    def config(constants: Constants, seed: int) -> str:
        priced = {name: value * scale for name, value in constants.items()}
        queue: Plugins = {"expected-work-queue": {"order": order, **PATIENCE}} if order else {}
        return _text({"expected-work-scorer": priced, **queue, **_picker(seed)})

    return config


def _llm_d(_: Constants, seed: int) -> str:
    weights = {"queue-scorer": 2, "kv-cache-utilization-scorer": 2, "prefix-cache-scorer": 3}
    return _text({**{kind: {} for kind in weights}, **_picker(seed)}, weights)


def _random(_: Constants, seed: int) -> str:
    return _text({"random-picker": {"seed": seed}}, {})


def _least_requests(_: Constants, seed: int) -> str:
    return _text({"active-request-scorer": {}, **_picker(seed)}, {"active-request-scorer": 1})


# Rules: the smallest cost wins, and of equal ones the endpoint with fewer requests.


def smallest(cost: Vector, view: View) -> int:
    return int(np.lexsort((view.requests, cost))[0])


def round_robin(seed: int) -> Rule:
    turn = iter(range(1 << 62))
    return lambda view: next(turn) % len(view.requests)


def least_work(seed: int) -> Rule:
    return lambda view: smallest(view.queued + view.new, view)


def product(seed: int) -> Rule:
    return lambda view: smallest((view.queued + view.new) * (view.requests + 1.0), view)


def blocks_sum(seed: int) -> Rule:
    return lambda view: smallest((view.queued + view.new + view.active) / BLOCK_TOKENS, view)


def threshold(seed: int) -> Rule:
    def choose(view: View) -> int:
        most, least = view.requests.max(), view.requests.min()
        if most - least > 64 and most > 1.5 * least:
            return int(view.requests.argmin())
        if view.blocks and view.matched.max() / len(view.blocks) > 0.3:
            return int(view.matched.argmax())
        return int(view.cache.argmin())

    return choose


def two_hashes(seed: int) -> Rule:
    def choose(view: View) -> int:
        rng = random.Random(hash(view.blocks[:2]))
        homes = np.array(rng.sample(range(len(view.requests)), 2))
        cost = np.full(len(view.requests), np.inf)
        cost[homes] = (view.queued + view.new)[homes]
        return smallest(cost, view)

    return choose


_EVERY = [
    Policy(name="warmroute", what="the default: expected work, queue with backfill", config=_warmroute("backfill")),
    Policy(name="warmroute-shortest", what="the same, shortest first", config=_warmroute("shortest")),
    Policy(name="warmroute-no-queue", what="expected work alone", config=_warmroute(None)),
    Policy(name="llm-d", what="llm-d's default weights, scraped load, exact index", config=_llm_d, scrapes=True),
    Policy(name="least-work", what="queued and new tokens, own books", rule=least_work),
    Policy(name="product", what="a reading of LMetric: (queued + new tokens) x (requests + 1)", rule=product),
    Policy(name="blocks-sum", what="a reading of Dynamo's cost: new and active blocks", rule=blocks_sum),
    Policy(name="threshold", what="a reading of SGLang's cache-aware router", rule=threshold),
    Policy(name="two-hashes", what="a reading of DualMap: better of two homes of the first 2 blocks", rule=two_hashes),
    Policy(name="least-requests", what="active-request-scorer alone", config=_least_requests),
    Policy(name="round-robin", what="one after the other", rule=round_robin),
    Policy(name="random", what="random-picker alone", config=_random),
]
_VARIANTS = [
    Policy(name="half-constants", what="warmroute-no-queue, a and q halved", config=_warmroute(None, 0.5)),
    Policy(name="double-constants", what="warmroute-no-queue, a and q doubled", config=_warmroute(None, 2.0)),
]
POLICIES = {policy.name: policy for policy in [*_EVERY, *_VARIANTS]}
DEFAULT = tuple(policy.name for policy in _EVERY)
