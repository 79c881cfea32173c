"""The `plugins:` list as instances: types looked up, parameters decoded, references between plugins resolved."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from fleet import plugin
from fleet.discovery import FileDiscovery
from fleet.plugin import Plugin, registered
from gateway.config_decode import Decoder
from gateway.config_document import PluginEntry
from gateway.config_source import At, Problem, did_you_mean, nearest
from gateway.unsupported import UNSUPPORTED, refusal

P = TypeVar("P", bound=Plugin)


class Plugins:
    """The plugin instances of a configuration by name, and where each was written."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.instances: dict[str, Plugin] = {}
        self.at: dict[str, At] = {}
        self.warnings: list[Problem] = []
        self.used: set[str] = set()
        """Names that something refers to."""
        self._broken: dict[str, type[Plugin] | None] = {}
        """Names whose entries have been reported, and their types where known or guessed."""
        self._no_names: set[str] = set()
        """Those of them that are misspelt types: nobody means them, so they are never suggested."""

    def warn(self, at: At, message: str) -> None:
        self.warnings.append(self.decoder.source.problem(at, message))

    # Making them

    def declare(self, entries: Sequence[PluginEntry | None], written: Any) -> None:
        """Instantiate the entries; `written` is the raw list, for names of entries that could not be decoded."""
        for index, entry in enumerate(entries):
            at: At = ("plugins", index)
            if entry is None:
                raw = written[index] if isinstance(written[index], dict) else {}
                names = [name for key in ("name", "type") if isinstance(name := raw.get(key), str)]
                self._broken |= dict.fromkeys(names, registered().get(names[-1]) if names else None)
                continue
            name = entry.name or entry.type
            if not entry.type:
                self.decoder.report((*at, "type"), "must not be empty")
            elif name in self.at:
                self.decoder.report(
                    at, f"the name {name!r} is taken by {_place(self.at[name])}; give one of them a name"
                )
            else:
                self.at[name] = at
                self._make(name, entry, at)
                self._explain_misplaced(name, entry, at)

    def inject(self, type_: str, kind: type[P], at: At = ()) -> P:
        """An instance of `type_` with defaults, named like its type; the existing one where there is one of that kind."""
        self.used.add(type_)
        existing = self.instances.get(type_)
        if isinstance(existing, kind):
            return existing
        made = registered()[type_](type_, registered()[type_].Parameters())
        if not isinstance(made, kind):
            raise TypeError(f"{type_} is not a {kind.__name__}")
        if existing is None and type_ not in self.at:
            self.add(made, at)
        return made

    def add(self, instance: Plugin, at: At) -> None:
        """An instance that no entry of its own declares."""
        self.instances[instance.name], self.at[instance.name] = instance, at

    def _make(self, name: str, entry: PluginEntry, at: At) -> None:
        kind = registered().get(entry.type)
        if kind is None:
            self._unknown(name, entry, at)
            return
        if kind.deprecated:
            self.warn((*at, "type"), f"{entry.type!r} is deprecated: {kind.deprecated}")
        elif entry.type != kind.type:
            self.warn((*at, "type"), f"{entry.type!r} is the old name of {kind.type!r}; use that")
        parameters = self.decoder.decode(entry.parameters, kind.Parameters, (*at, "parameters"), any_case=True)
        if parameters is None:
            self._broken[name] = kind
            return
        for place, newer in _outdated(parameters, (*at, "parameters")):
            self.warn(place, f"the older spelling of {newer}; use that")
        try:
            self.instances[name] = kind(name, self._placed(parameters))
        except Exception as error:  # noqa: BLE001 - anybody's code; a ValueError says what is wrong with the parameters
            message = str(error) if isinstance(error, ValueError) else f"{entry.type!r} cannot be made: {error!r}"
            self.decoder.refuse((*at, "parameters"), message)
            self._broken[name] = kind
            return
        self._broken.pop(name, None)  # guessed from an earlier misspelt entry, and here it is after all

    def _explain_misplaced(self, name: str, entry: PluginEntry, at: At) -> None:
        """Parameters that are written beside `parameters:`: what to do about them, and nothing else about their plugin."""
        kind = registered().get(entry.type)
        known = {field.encode_name.lower() for field in msgspec.structs.fields(kind.Parameters)} if kind else set()
        for index, problem in enumerate(self.decoder.problems):
            *parent, key = problem.at or ("",)
            if (*parent,) == at and str(key).lower() in known:
                message = f"a parameter of {entry.type!r}; write it under 'parameters:', indented further than that"
                self.decoder.problems[index] = msgspec.structs.replace(problem, message=message)
                self._broken[name] = kind

    def _unknown(self, name: str, entry: PluginEntry, at: At) -> None:
        """Report a type that there is not. What refers to the type that was meant is then no second problem."""
        known = [*registered(), *UNSUPPORTED]
        message = refusal(entry.type) or f"no plugin type {entry.type!r}{did_you_mean(entry.type, known)}"
        self.decoder.report((*at, "type"), message)
        meant = None if entry.type in UNSUPPORTED else nearest(entry.type, known)
        self._broken[name] = registered().get(meant or "")
        if name == entry.type:
            self._no_names.add(name)
            if meant and meant not in self.at:
                self._broken[meant] = registered().get(meant)

    def _placed(self, parameters: plugin.Parameters) -> plugin.Parameters:
        """Relative files of plugins that cannot know where the configuration is."""
        if isinstance(parameters, FileDiscovery.Parameters):
            return msgspec.structs.replace(parameters, path=self.decoder.resolve(parameters.path))
        return parameters

    # Finding them

    def of(self, kind: type[P]) -> dict[str, P]:
        """The instances of a kind by name, in their order."""
        return {name: instance for name, instance in self.instances.items() if isinstance(instance, kind)}

    def broken(self, kind: type[Plugin] = Plugin) -> bool:
        """Whether an entry of this kind could not be used; then its absence is no second problem."""
        return any(known is not None and issubclass(known, kind) for known in self._broken.values())

    def find(self, name: str, kind: type[P], at: At, wanted: str) -> P | None:
        """The instance that `at` refers to; None after a report, or silently where its own entry has been reported."""
        try:
            return self._lookup(name, kind, wanted)
        except LookupError as error:
            if name not in self._broken:
                self.decoder.report(at, str(error.args[0]))
            return None

    def _lookup(self, name: str, kind: type[P], wanted: str = "") -> P:
        self.used.add(name)
        instance = self.instances.get(name)
        if instance is None:
            known = [*self.instances, *(it for it in self._broken if it not in self._no_names)]
            if name in registered():
                raise LookupError(f"no plugin named {name!r}; declare it: add '- type: {name}' to plugins")
            raise LookupError(f"no plugin named {name!r}{did_you_mean(name, known)}")
        if not isinstance(instance, kind):
            wanted = wanted or "a" + re.sub(r"(?=[A-Z])", " ", kind.__name__).lower()
            raise LookupError(f"{name!r} is of type {instance.type!r}, which is not {wanted}")
        return instance

    def bind(self, written: Any) -> None:
        """Let every plugin resolve the plugins that it names."""
        for name, instance in list(self.instances.items()):
            asked: list[str] = []

            def lookup(other: str, kind: type[P], asked: list[str] = asked) -> P:
                asked.append(other)
                return self._lookup(other, kind)

            try:
                instance.bind(lookup)
            except LookupError as error:
                if asked and asked[-1] in self._broken:
                    continue
                at = self.at[name]
                if asked and at and isinstance(at[1], int):
                    raw = written[at[1]].get("parameters")
                    at = next(_where(raw, asked[-1], (*at, "parameters")), at)
                self.decoder.report(at, str(error.args[0]))

    def references(self, suffix: str) -> Iterator[tuple[str, At, str]]:
        """(plugin, place, value) of every top-level parameter whose name ends so; the value "" where it is not given."""
        for name, instance in list(self.instances.items()):
            for field in msgspec.structs.fields(type(instance.parameters)):
                if field.name.endswith(suffix):
                    value = getattr(instance.parameters, field.name) or ""
                    yield name, (*self.at[name], "parameters", field.encode_name), value


def _place(at: At) -> str:
    return f"plugins[{at[1]}]" if len(at) > 1 else "a default"


def _outdated(parameters: plugin.Parameters, at: At) -> Iterator[tuple[At, str]]:
    """(place, what to write instead) of every parameter that is given under an older name."""
    for field in msgspec.structs.fields(parameters):
        value, place = getattr(parameters, field.name), (*at, field.encode_name)
        if isinstance(value, plugin.Parameters):
            yield from _outdated(value, place)
        elif value is not None and field.name in parameters.older:
            yield place, parameters.older[field.name]


def _where(value: Any, wanted: str, at: At) -> Iterator[At]:
    """Paths inside `value` that hold the text `wanted`."""
    if value == wanted:
        yield at
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _where(item, wanted, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _where(item, wanted, (*at, index))
