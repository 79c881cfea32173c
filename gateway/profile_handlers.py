"""Profile handlers: which profiles a request runs, in which order, and what the engine is told of the picks.

A handler is asked for the next profile until it says None. A profile that found nothing, or whose decider said no, has an
empty pick; the handler treats both alike. A stage may be *gated* by a decider: the cycle asks it and keeps its verdict,
so handlers hold no state of a request.

The headers are llm-d's, read by its routing sidecar. A client must never be able to set them: `ROUTING_HEADERS` are
removed from every request before these are added.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Slots
from fleet.plugin import Decider, Plugin, ProfileHandler
from fleet.request import Request
from gateway.config_source import did_you_mean
from scorers.p2p_source_producer import CACHE_SOURCE

PREFILLER = "x-prefiller-host-port"
ENCODERS = "x-encoder-hosts-ports"
DATA_PARALLEL = "x-data-parallel-host-port"
ROUTING_HEADERS = (PREFILLER, ENCODERS, DATA_PARALLEL, CACHE_SOURCE)
"""Headers that only the router writes."""


_NONE = np.empty(0, np.intp)


class UnknownProfile(Exception):
    """The request names a profile that does not exist: the client's error."""


class StagedHandler(ProfileHandler):
    """What our own handlers add to the interface; a handler without it runs ungated and keeps the endpoint's address."""

    keeps_fallbacks = True
    """Whether another endpoint can take the request over with the same headers."""

    def __init__(self, name: str, parameters: plugin.Parameters) -> None:
        super().__init__(name, parameters)
        self.gates: dict[str, Decider] = {}
        """Profile -> the decider that is asked before it runs."""
        self.profiles: tuple[str, ...] = ()

    def use_profiles(self, names: Sequence[str]) -> None:
        """Told once which profiles exist, in their order. ValueError where the handler cannot work with them."""
        self.profiles = tuple(names)

    def address(self, slot: int, fleet: Fleet) -> str:
        """The `ip:port` that requests for this slot are sent to."""
        return fleet.endpoint(slot).address

    def prefill_slot(self, picks: Mapping[str, Slots]) -> int | None:
        """The slot that computes the prompt for the destination; None where that does it itself."""
        return None


class SingleProfileHandler(StagedHandler, type="single-profile-handler"):
    """Run the one profile there is.

    Added by itself to a configuration with exactly one profile and no handler.
    Source: llm-d-router single-profile-handler.
    """

    def use_profiles(self, names: Sequence[str]) -> None:
        if len(names) != 1:
            raise ValueError(f"runs exactly one profile, but there are {len(names)}: {', '.join(names)}")
        super().use_profiles(names)

    def next_profile(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> str | None:
        return None if picks else self.profiles[0]

    def primary(self, picks: Mapping[str, Slots]) -> str:
        return self.profiles[0]


class DataParallelProfileHandler(StagedHandler, type="data-parallel-profile-handler"):
    """Run the one profile and send to the engine's primary port, naming the chosen rank in a header.

    Use it where each data-parallel rank is an endpoint with a port of its own and llm-d's routing sidecar in front
    spreads them: `x-data-parallel-host-port` carries the pick, the destination is the same host at `primaryPort`.
    Source: llm-d-router data-parallel-profile-handler.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        primary_port: Annotated[int, Meta(ge=1, le=65535, description="Port of the sidecar on every host.")] = 8000

    parameters: Parameters
    keeps_fallbacks = False  # the header names the rank, and a retry elsewhere would carry it along

    def use_profiles(self, names: Sequence[str]) -> None:
        if len(names) != 1:
            raise ValueError(f"runs exactly one profile, but there are {len(names)}: {', '.join(names)}")
        super().use_profiles(names)

    def next_profile(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> str | None:
        return None if picks else self.profiles[0]

    def primary(self, picks: Mapping[str, Slots]) -> str:
        return self.profiles[0]

    def headers(self, picks: Mapping[str, Slots], fleet: Fleet) -> dict[str, str]:
        return {DATA_PARALLEL: _address(picks[self.profiles[0]][0], fleet)}

    def address(self, slot: int, fleet: Fleet) -> str:
        return _at_port(fleet.endpoint(slot).address, self.parameters.primary_port)


class HeaderProfileHandler(StagedHandler, type="header-profile-handler"):
    """Run the profile that a request header names.

    Use it to give kinds of traffic their own filters and scorers. A configuration with one profile always runs that one;
    a value that names no profile is the client's error (400).
    Source: llm-d-router header-profile-handler.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        header_name: Annotated[str, Meta(description="Header with the profile's name.", min_length=1)] = "EPP-Profile"
        default_profile: Annotated[str, Meta(description="Profile of requests without the header.")] = "decode"

    parameters: Parameters

    def use_profiles(self, names: Sequence[str]) -> None:
        super().use_profiles(names)
        default = self.parameters.default_profile
        if len(names) > 1 and default not in names:
            raise ValueError(f"defaultProfile: no profile named {default!r}{did_you_mean(default, names)}")

    def next_profile(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> str | None:
        if picks:
            return None
        if len(self.profiles) == 1:
            return self.profiles[0]
        settings = self.parameters
        name = request.headers.get(settings.header_name.lower()) or settings.default_profile
        if name not in self.profiles:
            raise UnknownProfile(f"header {settings.header_name}: no profile named {name!r}")
        return name

    def primary(self, picks: Mapping[str, Slots]) -> str:
        return next(iter(picks))


class StageNames(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    decode: Annotated[str | None, Meta(description="Profile that picks where the reply is generated; `decode`.")] = None
    prefill: Annotated[str | None, Meta(description="Profile that picks where the prompt is computed; `prefill`.")] = (
        None
    )
    encode: Annotated[str | None, Meta(description="Profile that picks who encodes images and audio; `encode`.")] = None


class StageDeciders(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    prefill: Annotated[
        str | None, Meta(description="Decider asked before `prefill`; without it there is no prefill stage.")
    ] = None
    encode: Annotated[
        str | None, Meta(description="Decider asked before `encode`; without it there is no encode stage.")
    ] = None


class _Disaggregated(StagedHandler):
    """Decode, prefill and encode stages, whatever the parameters are called."""

    def plan(self, stages: StageNames, deciders: StageDeciders, prefill_first: bool) -> None:
        self.decode = stages.decode or "decode"
        self.prefill = stages.prefill or "prefill"
        self.encode = stages.encode or "encode"
        self._named = [name for name in (stages.prefill, stages.encode) if name]
        self._deciders = deciders
        self._prefill_first = prefill_first
        self._order: tuple[str, ...] = ()

    def bind(self, lookup: Any) -> None:
        for stage, decider in ((self.prefill, self._deciders.prefill), (self.encode, self._deciders.encode)):
            if decider:
                self.gates[stage] = lookup(decider, Decider)

    def use_profiles(self, names: Sequence[str]) -> None:
        super().use_profiles(names)
        for name in (self.decode, *self._named):
            if name not in names:
                raise ValueError(f"no profile named {name!r}{did_you_mean(name, names)}")
        self._check_distinct()
        unused = [name for name in names if name not in (self.decode, self.prefill, self.encode)]
        if unused:
            raise ValueError(f"never runs the profile {unused[0]!r}: name it in parameters.profiles or remove it")
        self.gates = {name: decider for name, decider in self.gates.items() if name in names}
        encode = [self.encode] if self.encode in self.gates else []
        if self._prefill_first:
            prefill = [self.prefill] if self.prefill in names else []
            self._order = (*prefill, *encode, self.decode)
        else:
            prefill = [self.prefill] if self.prefill in self.gates else []
            self._order = (self.decode, *encode, *prefill)

    def _check_distinct(self) -> None:
        """A profile runs once per request, and its decider would be asked before the wrong stage."""
        stages = {"decode": self.decode}
        for stage, name in (("prefill", self.prefill), ("encode", self.encode)):
            if name not in self._named and name not in self.gates:
                continue  # there is no such stage
            if (other := next((known for known, taken in stages.items() if taken == name), None)) is not None:
                raise ValueError(
                    f"the {other} and the {stage} stage both run {name!r}: each needs a profile of its own"
                )
            stages[stage] = name

    def next_profile(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> str | None:
        if self.decode in picks and not len(picks[self.decode]):
            return None  # nowhere to decode: nothing else can help
        for stage in self._order:
            if stage not in picks:
                return stage
        return None

    def primary(self, picks: Mapping[str, Slots]) -> str:
        return self.decode

    def prefill_slot(self, picks: Mapping[str, Slots]) -> int | None:
        prefill, decode = picks.get(self.prefill, _NONE), picks.get(self.decode, _NONE)
        # An endpoint that does both is not handed what it already has.
        return int(prefill[0]) if len(prefill) and not (len(decode) and decode[0] == prefill[0]) else None

    def headers(self, picks: Mapping[str, Slots], fleet: Fleet) -> dict[str, str]:
        headers = {}
        if (prefill := self.prefill_slot(picks)) is not None:
            headers[PREFILLER] = _address(prefill, fleet)
        if len(encode := picks.get(self.encode, _NONE)):
            headers[ENCODERS] = ",".join(_address(slot, fleet) for slot in encode)
        return headers


_FLAT = {
    "decode_profile": "profiles.decode",
    "prefill_profile": "profiles.prefill",
    "encode_profile": "profiles.encode",
    "prefill_decider_plugin_name": "deciders.prefill",
    "encode_decider_plugin_name": "deciders.encode",
    "decider_plugin_name": "deciders.prefill",
}


class DisaggProfileHandler(_Disaggregated, type="disagg-profile-handler"):
    """Split a request into encode, prefill and decode stages, each with a profile of its own.

    decode-first (the default) picks where to decode, then asks `deciders.encode` and `deciders.prefill` whether the other
    stages are worth it; a stage without a decider never runs. prefill-first always prefills when a prefill profile exists
    and takes no prefill decider. A stage that finds no endpoint is dropped: the decode endpoint then does its work.
    Headers: `x-prefiller-host-port` (the prefill pick), `x-encoder-hosts-ports` (all encode picks).
    Source: llm-d-router disagg-profile-handler; its older flat parameters are accepted instead of the nested ones.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        older = _FLAT

        stage_order: Annotated[
            Literal["decode-first", "prefill-first"], Meta(description="Which stage is picked first.")
        ] = "decode-first"
        profiles: Annotated[StageNames, Meta(description="Names of the stages' profiles.")] = StageNames()
        deciders: Annotated[StageDeciders, Meta(description="Plugin names of the stages' deciders.")] = StageDeciders()
        decode_profile: Annotated[str | None, Meta(description="Older spelling of profiles.decode.")] = None
        prefill_profile: Annotated[str | None, Meta(description="Older spelling of profiles.prefill.")] = None
        encode_profile: Annotated[str | None, Meta(description="Older spelling of profiles.encode.")] = None
        prefill_decider_plugin_name: Annotated[str | None, Meta(description="Older spelling of deciders.prefill.")] = (
            None
        )
        encode_decider_plugin_name: Annotated[str | None, Meta(description="Older spelling of deciders.encode.")] = None
        decider_plugin_name: Annotated[str | None, Meta(description="Oldest spelling of deciders.prefill.")] = None

        def __post_init__(self) -> None:
            flat = [name for name in _FLAT if getattr(self, name) is not None]
            if flat and (self.profiles != StageNames() or self.deciders != StageDeciders()):
                raise ValueError(
                    f"{_camel(flat[0])} is the older spelling of {_FLAT[flat[0]]}; use one of the two forms, not both"
                )
            if self.prefill_decider_plugin_name and self.decider_plugin_name:
                raise ValueError("deciderPluginName and prefillDeciderPluginName mean the same; use deciders.prefill")
            if self.stage_order == "prefill-first" and (
                self.deciders.prefill or self.prefill_decider_plugin_name or self.decider_plugin_name
            ):
                raise ValueError("prefill-first always prefills: remove the prefill decider, or use decode-first")

    def __init__(self, name: str, parameters: Parameters) -> None:
        super().__init__(name, parameters)
        given = parameters
        stages = StageNames(
            decode=given.profiles.decode or given.decode_profile,
            prefill=given.profiles.prefill or given.prefill_profile,
            encode=given.profiles.encode or given.encode_profile,
        )
        deciders = StageDeciders(
            prefill=given.deciders.prefill or given.prefill_decider_plugin_name or given.decider_plugin_name,
            encode=given.deciders.encode or given.encode_decider_plugin_name,
        )
        self.plan(stages, deciders, given.stage_order == "prefill-first")


class PdProfileHandler(_Disaggregated, type="pd-profile-handler"):
    """Decode first, then prefill elsewhere if the decider says so: the older form of disagg-profile-handler.

    Source: llm-d-router pd-profile-handler.
    """

    deprecated = "use disagg-profile-handler with deciders.prefill"

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        decode_profile: Annotated[str, Meta(description="Profile that picks where to decode.")] = "decode"
        prefill_profile: Annotated[str, Meta(description="Profile that picks where to prefill.")] = "prefill"
        decider_plugin_name: Annotated[str, Meta(description="Plugin name of the decider.")] = "prefix-based-pd-decider"
        primary_port: Annotated[
            int, Meta(ge=0, le=65535, description="As in data-parallel-profile-handler; 0 = send to the picked port.")
        ] = 0
        prefix_plugin_type: Annotated[str | None, Meta(description="Accepted, without effect.")] = None
        prefix_plugin_name: Annotated[str | None, Meta(description="Accepted, without effect.")] = None
        prefix_match_info_producer_name: Annotated[
            str | None, Meta(description="Accepted, without effect: the decider names its producer.")
        ] = None

    def __init__(self, name: str, parameters: Parameters) -> None:
        super().__init__(name, parameters)
        given = parameters
        self.plan(
            StageNames(decode=given.decode_profile, prefill=given.prefill_profile),
            StageDeciders(prefill=given.decider_plugin_name),
            prefill_first=False,
        )
        self._port = given.primary_port
        self.keeps_fallbacks = not self._port

    def headers(self, picks: Mapping[str, Slots], fleet: Fleet) -> dict[str, str]:
        headers = super().headers(picks, fleet)
        if self._port:
            headers[DATA_PARALLEL] = _address(picks[self.decode][0], fleet)
        return headers

    def address(self, slot: int, fleet: Fleet) -> str:
        address = fleet.endpoint(slot).address
        return _at_port(address, self._port) if self._port else address


class DisaggHeadersHandler(Plugin, type="disagg-headers-handler"):
    """Nothing any more: the profile handlers write the hand-off's headers themselves.

    Source: llm-d-router disagg-headers-handler, prefill-header-handler.
    """

    aliases = ("prefill-header-handler",)
    deprecated = "remove it: disagg-profile-handler writes these headers itself"

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        prefill_profile: Annotated[str, Meta(description="Accepted, without effect.")] = "prefill"
        encode_profile: Annotated[str, Meta(description="Accepted, without effect.")] = "encode"


def _address(slot: Any, fleet: Fleet) -> str:
    return fleet.endpoint(int(slot)).address


def _at_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def addresses(slots: Iterable[int], handler: ProfileHandler, fleet: Fleet) -> tuple[str, ...]:
    """Where requests for these slots go, without repetitions, in order."""
    if isinstance(handler, StagedHandler):
        return tuple(dict.fromkeys([handler.address(slot, fleet) for slot in slots]))
    return tuple(dict.fromkeys([fleet.endpoint(slot).address for slot in slots]))
