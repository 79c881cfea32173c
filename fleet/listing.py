"""What an engine lists under /v1/models: names of its base model, and adapters."""

from collections.abc import Mapping

import msgspec


class _Entry(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Page(msgspec.Struct):
    data: list[_Entry]


class Listing(msgspec.Struct, frozen=True):
    """One engine's models. Empty where it lists none."""

    base: tuple[str, ...] = ()
    """All names of the base model, in the engine's order."""
    adapters: Mapping[str, str | None] = {}
    """Adapter name -> path (vLLM's `root`), None where the engine does not say."""
    root: str | None = None
    """What the engine was started with as `--model`; None where it does not say."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset((*self.base, *self.adapters))


def parse(body: bytes) -> Listing:
    """The answer of GET /v1/models. An entry with a `parent` is an adapter (vLLM 0.32). Raises msgspec.DecodeError."""
    entries = msgspec.json.decode(body, type=_Page).data
    roots = [entry.root for entry in entries if not entry.parent]
    return Listing(
        root=roots[0] if roots else None,
        base=tuple(entry.id for entry in entries if not entry.parent),
        adapters={entry.id: entry.root for entry in entries if entry.parent},
    )
