"""The endpoints document: text a person writes -> endpoints, strictly.

    endpoints:
    - name: engine-0              # llm-d's file form: name, namespace, address, port, labels
      address: 10.0.0.11
      port: 8000
      labels: {llm-d.ai/role: decode}
      events: 5557                # ours, from here on: a port on the same host, or a full address
      replay: 5558
      dataParallelSize: 2         # one endpoint per rank; event and replay ports count up with the rank

One bad entry costs that entry and is reported; a document that is not one at all is an error.
"""

import difflib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from fleet.endpoint import ROLE_LABEL, Endpoint, Role

MAX_BYTES = 1 << 20
"""A larger document is refused, as llm-d does."""

Port = Annotated[int, Meta(ge=1, le=65535)]
Rank = Annotated[int, Meta(ge=0, le=1023)]
Ranks = Annotated[int, Meta(ge=1, le=1024)]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """One entry as written; `endpoints_of` turns it into one endpoint per data-parallel rank."""

    name: Annotated[str, Meta(min_length=1, description="Unique within the namespace.")]
    address: Annotated[str, Meta(min_length=1, description="IP address; Envoy connects to it as it is.")]
    namespace: str = "default"
    port: Annotated[Port | str, Meta(description="HTTP port.")] = 8000
    labels: dict[str, str] = {}
    role: Annotated[str | None, Meta(description="Short for the label llm-d.ai/role.")] = None
    events: Annotated[
        Port | str | None,
        Meta(
            description="Where KV events are published: a port, tcp://host:port, or bind:tcp://host:port to bind here."
        ),
    ] = None
    replay: Annotated[Port | str | None, Meta(description="The replay socket: a port or tcp://host:port.")] = None
    topic: Annotated[str, Meta(description="Event topic prefix; empty hears everything.")] = ""
    model: Annotated[str | None, Meta(description="The served model; without it /v1/models is asked.")] = None
    rank: Annotated[Rank | None, Meta(description="This entry is one data-parallel rank; ports as written.")] = None
    data_parallel_size: Annotated[
        Ranks | None, Meta(description="Expand into so many ranks; event and replay ports + rank.")
    ] = None


class Document(msgspec.Struct, frozen=True):
    """What a document says."""

    endpoints: list[Endpoint]
    problems: list[str] = []
    """Entries that were left out: where, what, what would be right."""


def parse(text: bytes | str, source: str) -> Document:
    """Endpoints of a YAML or JSON document. `source` names it in messages. ValueError where it is not such a document."""
    if len(text) > MAX_BYTES:
        raise ValueError(
            f"{source}: larger than {MAX_BYTES} bytes; an endpoints document of a thousand is a tenth of that"
        )
    try:
        document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError(f"{source}: not YAML: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("endpoints"), list):
        raise ValueError(f"{source}: expected a mapping with a list `endpoints`")
    unknown = [key for key in document if key != "endpoints"]
    if unknown:
        raise ValueError(f"{source}: {unknown[0]}: not a known key; the only one is 'endpoints'")
    entries: list[tuple[str, Entry]] = []
    problems: list[str] = []
    for position, value in enumerate(document["endpoints"]):
        at = f"{source}: endpoints[{position}]"
        try:
            entries.append((at, _entry(value, at)))
        except ValueError as error:
            problems.append(str(error))
    collected = collect(entries)
    return Document(collected.endpoints, problems + collected.problems)


def collect(entries: Iterable[tuple[str, Entry]]) -> Document:
    """Endpoints of decoded entries, each with the words that locate it in messages."""
    endpoints: list[Endpoint] = []
    problems: list[str] = []
    names: dict[tuple[str, str], str] = {}
    addresses: dict[tuple[str, int], str] = {}
    for at, entry in entries:
        try:
            expanded = endpoints_of(entry, at)
            for endpoint in expanded:
                if (endpoint.namespace, endpoint.name) in names:
                    raise ValueError(
                        f"{at}.name: {endpoint.name!r} is taken by {names[endpoint.namespace, endpoint.name]}"
                    )
                if (endpoint.address, endpoint.rank) in addresses:
                    other = addresses[endpoint.address, endpoint.rank]
                    rank = f" rank {endpoint.rank}" if endpoint.rank or entry.data_parallel_size else ""
                    raise ValueError(f"{at}.port: {endpoint.address}{rank} is already {other}")
        except ValueError as error:
            problems.append(str(error))
            continue
        for endpoint in expanded:
            names[endpoint.namespace, endpoint.name] = addresses[endpoint.address, endpoint.rank] = at.split(": ")[-1]
        endpoints += expanded
    return Document(endpoints, problems)


def endpoints_of(entry: Entry, at: str) -> list[Endpoint]:
    """One endpoint, or one per rank. ValueError says what is wrong where (`at`) and what would be right."""
    host = _host(entry.address, f"{at}.address")
    port = _port(entry.port, f"{at}.port")
    labels = dict(entry.labels)
    if entry.role is not None:
        if labels.get(ROLE_LABEL, entry.role) != entry.role:
            raise ValueError(f"{at}.role: {entry.role!r}, but the label {ROLE_LABEL} says {labels[ROLE_LABEL]!r}")
        labels[ROLE_LABEL] = entry.role
    if ROLE_LABEL in labels:
        _one_of(labels[ROLE_LABEL], [role.value for role in Role], f"{at}.role" if entry.role else f"{at}.labels")
    if entry.rank is not None and entry.data_parallel_size is not None:
        raise ValueError(f"{at}: rank and dataParallelSize exclude each other; dataParallelSize makes all ranks itself")
    ranks = range(entry.data_parallel_size) if entry.data_parallel_size else [entry.rank or 0]
    several = entry.data_parallel_size is not None and entry.data_parallel_size > 1
    return [
        Endpoint(
            name=f"{entry.name}-rank-{rank}" if several else entry.name,
            namespace=entry.namespace,
            address=f"{host}:{port}",
            labels=labels,
            rank=rank,
            events=_socket(entry.events, host, rank if several else 0, f"{at}.events", may_bind=True),
            replay=_socket(entry.replay, host, rank if several else 0, f"{at}.replay", may_bind=False),
            topic=entry.topic,
            model=entry.model,
        )
        for rank in ranks
    ]


def _entry(value: Any, at: str) -> Entry:
    if not isinstance(value, Mapping):
        raise ValueError(f"{at}: expected a mapping with at least name and address, got {value!r}")
    known = {field.encode_name for field in msgspec.structs.fields(Entry)}
    for key in value:
        if key not in known:
            raise ValueError(f"{at}.{key}: not a known key{_near(str(key), known)}")
    try:
        return msgspec.convert(value, Entry)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise ValueError(f"{at}{path.rstrip('`')}: {message}") from error


def _host(text: str, at: str) -> str:
    try:
        address = ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        raise ValueError(
            f"{at}: expected an IP address such as 10.0.0.11 (Envoy connects to it as it is), got {text!r}"
        ) from None
    return f"[{address}]" if address.version == 6 else str(address)


def _port(value: int | str, at: str) -> int:
    port = int(value) if isinstance(value, int) or value.isdecimal() else 0
    if not 0 < port < 65536:
        raise ValueError(f"{at}: expected a port from 1 to 65535, got {value!r}")
    return port


def _socket(value: int | str | None, host: str, offset: int, at: str, *, may_bind: bool) -> str | None:
    if value is None:
        return None
    if isinstance(value, int) or value.isdecimal():
        value = f"tcp://{host}:{_port(value, at)}"
    bind = "bind:" if may_bind and value.startswith("bind:") else ""
    if not bind and (wildcard := re.fullmatch(r"tcp://(?:\*|0\.0\.0\.0|\[::\]):(\d+)", value)):
        raise ValueError(
            f"{at}: {value!r} is where an engine listens; write its port, {wildcard[1]}, or tcp://HOST:{wildcard[1]}"
        )
    found = re.fullmatch(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/\s]+):(\d{1,5})", value.removeprefix(bind))
    if found is None:
        forms = "a port, tcp://host:port" + (" or bind:tcp://host:port" if may_bind else "")
        raise ValueError(f"{at}: expected {forms}, got {value!r}")
    return f"{bind}tcp://{found[1]}:{_port(int(found[2]) + offset, at)}"


def _one_of(value: str, choices: list[str], at: str) -> None:
    if value not in choices:
        raise ValueError(f"{at}: no role {value!r}{_near(value, choices)}")


def _near(name: str, choices: Iterable[str]) -> str:
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(choices)}"
