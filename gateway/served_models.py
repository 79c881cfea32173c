"""Which model names exist, and what they mean for block keys: a base model and maybe an adapter on it.

Three sources, in this order: `warmroute.models` of the configuration, what discovery says of an endpoint, and what the
engines list under /v1/models. Where no source knows any model, every name is accepted: knowing nothing is no reason to
answer 404.
"""

import logging
from collections.abc import Mapping

import msgspec
import numpy as np

from fleet.fleet import Fleet, Mask
from gateway.config_document import Model

log = logging.getLogger(__name__)


class Served(msgspec.Struct, frozen=True):
    """A model name, resolved."""

    name: str
    """As the client wrote it and the engine knows it."""
    base: str
    """The base model: what seeds the block keys. All names of one model share it."""
    lora: str | None = None
    """The adapter's name, where `name` is one."""


class ServedModels:
    """Resolves names. The event loop's thread owns it."""

    def __init__(self, configured: Mapping[str, Model], fleet: Fleet) -> None:
        self._fleet = fleet
        self._names: dict[str, Served] = {}
        self._serving: dict[Served, Mask] = {}
        self._roots: dict[str, str | None] = {}
        self._known_at = (-1, -1)
        self.configure(configured)

    def configure(self, configured: Mapping[str, Model]) -> None:
        """Use another `warmroute.models`."""
        self._canonical = {alias: name for name, model in configured.items() for alias in (name, *model.aliases)}
        self._configured = tuple(configured)
        self._engine_models = {name: model.images.engine_model for name, model in configured.items() if model.images}
        self._known_at = (-1, -1)

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
        if (found := self._fleet.listings[slot]).base:
            return self.canonical(found.base[0])
        return self._configured[0] if len(self._configured) == 1 else None

    def engine_model(self, served: Served) -> str | None:
        """What the engines that serve the model were started with as `--model`: by the configuration, else by what the first of
        them lists. None where nobody has said."""
        if (said := self._engine_models.get(served.base)) is not None:
            return said
        self._known()  # clears what is remembered here when anything has changed
        if served.base not in self._roots:
            slots = map(int, self._fleet.slots())
            roots = dict.fromkeys(
                self._fleet.listings[slot].root for slot in slots if self.base_of(slot) == served.base
            )
            found = [root for root in roots if root is not None]
            if len(found) > 1:
                # Names of images differ between these engines: only the first one's are predicted.
                log.warning("engine_models_differ model=%s using=%s all=%s", served.base, found[0], ",".join(found))
            self._roots[served.base] = found[0] if found else None
        return self._roots[served.base]

    def adapter_paths(self, slot: int) -> Mapping[str, str | None]:
        """Adapter name -> path on that engine, as far as it lists them."""
        return self._fleet.listings[slot].adapters

    def serving(self, served: Served) -> Mask:
        """Per slot whether it serves the model; True where nobody has said what it serves. Not to be changed."""
        names = self._known()  # clears what is remembered here when anything has changed
        if served in self._serving:
            return self._serving[served]
        mask = np.ones(self._fleet.capacity, np.bool_)
        for slot in self._fleet.slots():
            base = self.base_of(int(slot))
            if base is not None and base != served.base:
                mask[slot] = False
            elif served.lora is not None and (found := self._fleet.listings[slot]).base:
                mask[slot] = served.lora in found.adapters
        if served.name in names:  # not whatever a client may write
            self._serving[served] = mask
        return mask

    def is_known(self, name: str) -> bool:
        """Whether somebody has said that this model exists; a client's word does not count."""
        return name in self._known()

    def names(self) -> list[str]:
        """All names that are accepted, for error messages."""
        return sorted(self._known())

    def _known(self) -> dict[str, Served]:
        if self._known_at == (now := (self._fleet.generation, self._fleet.listings_changed)):
            return self._names
        self._serving.clear()
        self._roots.clear()
        names = {alias: Served(alias, base) for alias, base in self._canonical.items()}
        for slot in map(int, self._fleet.slots()):
            if model := self._fleet.endpoint(slot).model:
                names.setdefault(model, Served(model, self.canonical(model)))
            found = self._fleet.listings[slot]
            if not found.base:
                continue
            base = self.canonical(found.base[0])
            for name in found.base:
                names.setdefault(name, Served(name, base))
            for adapter in found.adapters:
                names.setdefault(adapter, Served(adapter, base, adapter))
        self._names, self._known_at = names, now
        return names
