"""What a plugin is: the small units that an EndpointPickerConfig names.

A plugin class carries its own page: the docstring says what it does and why one would want it, `Parameters` are its
parameters with defaults in the YAML's own names. The registry, strict decoding, `warmroute plugins` and docs/plugins.md
come from the class; nothing else is edited to add one.

A request is first shown to every `HeaderReader`. A scheduling cycle then calls, in this order: `Producer.produce`, then per
profile every `Filter.keep`, every `Scorer.score` and one `Picker.pick`; a `ProfileHandler` says which profile runs next; a
`Decider` is asked between decode and prefill; `request_headers` and `response_headers` are asked of the decision, and
`picked` tells every plugin what became of the request.
"""

import builtins
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet, Mask, Slots, Vector
from fleet.request import Request


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Base of all parameter structs: the type is the schema. Document a field with `Annotated[T, Meta(description=...)]`."""

    older: ClassVar[Mapping[str, str]] = {}
    """Field -> what to write instead of it. It must be None where it is not given; giving it is a warning."""


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """What a plugin tells the engine in request headers, and why."""

    outcome: str
    """A short label; becomes a metric label, so it comes from a fixed set."""
    headers: Mapping[str, str] = {}
    """Lower-case names; empty where there is nothing to tell."""
    endpoint: int | None = None
    """The slot that the headers name."""
    numbers: dict[str, float] = {}
    """What the outcome follows from."""


P = TypeVar("P", bound="Plugin")
Lookup = Callable[[str, type[P]], P]

_NoParameters = Parameters

_registry: dict[str, type["Plugin"]] = {}


class Plugin:
    """Base of everything that `plugins:` can name. Subclass one of the kinds below, not this."""

    type: ClassVar[str] = ""
    Parameters: ClassVar[builtins.type[_NoParameters]] = _NoParameters
    """The parameter struct; a subclass of the module's `Parameters`, which itself has no fields."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Older names that still work."""
    deprecated: ClassVar[str] = ""
    """Why not to use it any more and what to use; empty where it is current."""

    def __init_subclass__(cls, *, type: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not type:
            return  # a kind, not a plugin
        cls.type = type
        for name in (type, *cls.aliases):
            if name in _registry:
                raise TypeError(
                    f"plugin type {name!r} is defined twice: {_registry[name].__qualname__} and {cls.__qualname__}"
                )
            _registry[name] = cls

    def __init__(self, name: str, parameters: _NoParameters) -> None:
        self.name = name
        self.parameters = parameters

    def bind(self, lookup: "Lookup[Any]") -> None:
        """Resolve references to other plugins: `lookup(name, Kind)` returns the instance or raises LookupError."""

    def picked(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> None:
        """Called once after the decision, with the slots that each profile picked, best first. The destination's profile is the
        first one."""

    def take_over(self, old: "Plugin") -> None:
        """Called when a reload has put this plugin in the place of `old`, of the same name and class: keep what it remembers."""

    def request_headers(
        self, request: Request, picks: Mapping[str, Slots], primary: str, candidates: Slots, fleet: Fleet
    ) -> Hint | None:
        """Headers for the engine, such as where it can pull KV blocks from; None where the plugin has none for anybody.

        Asked with every look at a decision, so nothing may be remembered here. `primary`: the profile whose pick is the
        destination. `candidates`: every endpoint the request could have gone to, whatever the profiles' filters made of it.
        The profile handler's own headers win over these.
        """
        return None

    def response_headers(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> dict[str, str]:
        """Headers for the client's response, such as a session token. `picks` as in `picked`, but asked with every look."""
        return {}


class Filter(Plugin):
    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        """A mask over `candidates`: True for those that stay."""
        raise NotImplementedError(self.type)


class Scorer(Plugin):
    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        """A number in 0..1 for each of `candidates`; larger is better."""
        raise NotImplementedError(self.type)


class Picker(Plugin):
    def pick(self, request: Request, candidates: Slots, scores: Vector, fleet: Fleet) -> Slots:
        """The chosen slots, best first. The first is the destination, the rest are fallbacks."""
        raise NotImplementedError(self.type)


class Verdict(msgspec.Struct, frozen=True):
    """What a decider says, and the numbers it said it from."""

    disaggregate: bool
    reason: str
    """A short label; becomes a metric label, so it comes from a fixed set."""
    numbers: dict[str, float] = {}


class Decider(Plugin):
    def decide(self, request: Request, decode: int, fleet: Fleet) -> Verdict:
        """Whether the request, having picked slot `decode`, goes through another stage first."""
        raise NotImplementedError(self.type)


class HeaderReader(Plugin):
    """Reads one attribute of a request from its headers, before anything else is known of it."""

    attribute: ClassVar[str] = ""
    """What it is called in `Request.attributes`."""

    def read(self, headers: Mapping[str, str]) -> str | None:
        """The attribute's value, None where the request does not have it. Names in `headers` are lower-case."""
        raise NotImplementedError(self.type)


class Producer(Plugin):
    def produce(self, request: Request, fleet: Fleet) -> None:
        """Fill what this producer knows into the request. A producer that fails costs its own data, not the request."""


class ProfileHandler(Plugin):
    def next_profile(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> str | None:
        """The profile to run next, given what has been picked so far; None when done."""
        raise NotImplementedError(self.type)

    def primary(self, picks: Mapping[str, Slots]) -> str:
        """The profile whose pick is the destination."""
        raise NotImplementedError(self.type)

    def headers(self, picks: Mapping[str, Slots], fleet: Fleet) -> dict[str, str]:
        """Headers the engine (or its routing sidecar) needs, such as `x-prefiller-host-port`."""
        return {}


class Found(msgspec.Struct, frozen=True):
    """What discovery sees at one moment."""

    endpoints: list[Endpoint]
    problems: list[str] = []
    """Entries that were left out, each with what is wrong and what would be right."""


class Discovery(Plugin):
    """Where endpoints come from: `dataLayer.discovery.pluginRef` names one."""

    async def changes(self) -> AsyncIterator[Found]:
        """The whole fleet, first as it is now and then again after every change. OSError or ValueError at the start only."""
        raise NotImplementedError(self.type)
        yield  # an async generator, in this base class too


def registered() -> Mapping[str, type[Plugin]]:
    """Every known plugin type, aliases included."""
    return _registry
