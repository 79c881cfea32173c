"""Which model names exist, and what they mean for block keys: a base model and maybe an adapter on it.

Three sources, in this order: `warmroute.models` of the configuration, what discovery says of an endpoint, and what the
engines list under /v1/models. Where no source knows any model, every name is accepted: knowing nothing is no reason to
answer 404.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from fleet.fleet import Fleet, Mask
from gateway.config_document import Model


class Served(msgspec.Struct, frozen=True):
    """A model name, resolved."""

    name: str
    """As the client wrote it and the engine knows it."""
    base: str
    """The base model: what seeds the block keys. All names of one model share it."""
    lora: str | None = None
    """The adapter's name, where `name` is one."""


class Listing(msgspec.Struct, frozen=True):
    """What one engine lists: names of its base model, and adapters with their paths."""

    base: tuple[str, ...]
    """All names of the base model, the engine's own first one first."""
    adapters: Mapping[str, str | None] = {}
    """Adapter name -> path (`root`), None where the engine does not say."""


def listing(entries: Sequence[Mapping[str, object]]) -> Listing:
    """From the `data` of GET /v1/models. An entry with a `parent` is an adapter (vLLM 0.32)."""
    base = [str(entry["id"]) for entry in entries if not entry.get("parent") and "id" in entry]
    adapters = {
        str(entry["id"]): str(entry["root"]) if entry.get("root") else None
        for entry in entries
        if entry.get("parent") and "id" in entry
    }
    return Listing(tuple(base), adapters)


class ServedModels:
    """Resolves names. The event loop's thread owns it."""

    def __init__(self, configured: Mapping[str, Model], fleet: Fleet) -> None:
        self._fleet = fleet
        self._canonical = {alias: name for name, model in configured.items() for alias in (name, *model.aliases)}
        self._configured = frozenset(configured)
        self._listings: dict[int, Listing] = {}
        self._names: dict[str, Served] = {}
        self._generation = -1

    def heard(self, slot: int, found: Listing) -> None:
        """Remember what the engine on `slot` lists."""
        if self._listings.get(slot) != found:
            self._listings[slot] = found
            self._generation = -1

    def forget(self, slot: int) -> None:
        """The slot's endpoint is gone."""
        if self._listings.pop(slot, None):
            self._generation = -1

    def resolve(self, name: str) -> Served | None:
        """What `name` means; None where models are known and it is none of them."""
        names = self._known()
        if served := names.get(name):
            return served
        if names:
            return None
        return Served(name, self.canonical(name))

    def canonical(self, name: str) -> str:
        """The one name of a base model that stands for all its names."""
        return self._canonical.get(name, name)

    def base_of(self, slot: int) -> str | None:
        """The base model of an endpoint; None while nobody has said."""
        endpoint = self._fleet.endpoint(slot)
        if endpoint.model:
            return self.canonical(endpoint.model)
        if (found := self._listings.get(slot)) and found.base:
            return self.canonical(found.base[0])
        return next(iter(self._configured)) if len(self._configured) == 1 else None

    def adapter_paths(self, slot: int) -> Mapping[str, str | None]:
        """Adapter name -> path on that engine, as far as it lists them."""
        found = self._listings.get(slot)
        return found.adapters if found else {}

    def serving(self, served: Served) -> Mask:
        """Per slot whether it serves the model; True where nobody has said what it serves."""
        mask = np.ones(self._fleet.capacity, np.bool_)
        for slot in self._fleet.slots():
            base = self.base_of(int(slot))
            if base is not None and base != served.base:
                mask[slot] = False
            elif served.lora is not None and (found := self._listings.get(int(slot))):
                mask[slot] = served.lora in found.adapters
        return mask

    def names(self) -> list[str]:
        """All names that are accepted, for error messages."""
        return sorted(self._known())

    def _known(self) -> dict[str, Served]:
        if self._generation == self._fleet.generation:
            return self._names
        names = {alias: Served(alias, base) for alias, base in self._canonical.items()}
        for slot in map(int, self._fleet.slots()):
            if model := self._fleet.endpoint(slot).model:
                names.setdefault(model, Served(model, self.canonical(model)))
            if (found := self._listings.get(slot)) is None or not found.base:
                continue
            base = self.canonical(found.base[0])
            for name in found.base:
                names.setdefault(name, Served(name, base))
            for adapter in found.adapters:
                names.setdefault(adapter, Served(adapter, base, adapter))
        self._names, self._generation = names, self._fleet.generation
        return names
