"""Plain values into typed structs, strictly, reporting everything that is wrong instead of the first thing.

msgspec decodes faster but stops at the first error; a person who edits a configuration wants the whole list. So this
module walks the struct types itself and leaves only single values to msgspec. Four formats may be asked for in a field's
annotation, wherever the struct is defined: `Meta(extra={"format": "duration"})` on a float (text such as "200ms", read as
seconds), "quantity" on an int (text such as "10Gi"), "path" on a str (relative to the document) and "model" on a str (a
directory, or the name of a model in the local Hugging Face cache).
"""

import math
import os
import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

import msgspec

from gateway.config_source import At, Problem, Source, did_you_mean
from tokenization.model_files import find_model_directory

Duration: TypeAlias = Annotated[float, msgspec.Meta(extra={"format": "duration"})]
"""Seconds, written like Go's durations: 200ms, 1.5s, 1m30s."""
Quantity: TypeAlias = Annotated[int, msgspec.Meta(extra={"format": "quantity"})]
"""A whole number, written like a Kubernetes quantity: 10Gi, 1k, 5000."""
Path: TypeAlias = Annotated[str, msgspec.Meta(extra={"format": "path"})]
"""A file or directory; a relative one starts from the folder of the document."""
ModelDirectory: TypeAlias = Annotated[str, msgspec.Meta(extra={"format": "model"})]
"""A directory with a tokenizer as `Path`, or a model's name such as `Qwen/Qwen3-8B` where the local Hugging Face cache has it."""

T = TypeVar("T")

LARGEST = 2**63 - 1
"""Of a number, as in Go; columns of numbers here hold no larger ones either."""
TOO_LARGE = "expected a number of at most 64 bits"

_DURATION_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_QUANTITY_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def seconds(text: str) -> float:
    """The seconds in a duration such as "1m30s"; "0" needs no unit. Raises ValueError."""
    if text == "0":
        return 0.0
    parts = re.findall(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|ms|s|m|h)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text.removeprefix("-"):
        raise ValueError(f"expected a duration such as '200ms', '5s' or '1m30s', got {text!r}")
    total = sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)
    return -total if text.startswith("-") else total


def amount(value: str | int | float) -> int:
    """The whole number in a quantity such as "10Gi" or 5000. Raises ValueError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|[kMGT]|)B?", str(value))
    if isinstance(value, bool) or not found:
        raise ValueError(f"expected a quantity such as '10Gi', '5k' or 5000, got {value!r}")
    number, unit = found[1], _QUANTITY_UNITS[found[2]]
    return int(float(number) * unit) if "." in number else int(number) * unit


class Decoder:
    """Decodes parts of one document and collects the problems of all of them in `problems`."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self._salvaging = False

    def report(self, at: At, message: str) -> None:
        self.problems.append(self.source.problem(at, message))

    def refuse(self, at: At, text: str) -> None:
        """Report what a part's own code says about it: a problem per line, each at the key that the line begins with
        (`endpoints[1].port: ...`), if that is written there."""
        for line in text.splitlines():
            path, colon, message = line.partition(": ")
            keys = tuple(int(key) if key.isdecimal() else key for key in re.findall(r"[^.\[\]]+", path))
            if colon and keys and (*at, keys[0]) in self.source.places:
                self.report((*at, *keys), message)
            else:
                self.report(at, line)

    def resolve(self, path: str) -> str:
        """A path as written in the document, from the document's folder."""
        return os.path.normpath(os.path.join(os.path.dirname(self.source.file), path))

    def decode(self, value: Any, kind: type[T], at: At, *, any_case: bool = False) -> T | None:
        """`value` as a `kind` (a struct type), or None where it has problems, which are then in `problems`.

        any_case accepts field names in any capitalisation, as Go's JSON decoder does for plugin parameters.
        """
        before = len(self.problems)
        result = self._value(value, kind, at, any_case)
        return result if len(self.problems) == before else None

    def salvage(self, value: Any, kind: type[T], at: At) -> T | None:
        """Like `decode`, but what is broken becomes its default, or None inside a list, so that the rest can be checked."""
        self._salvaging = True
        result: T | None = self._value(value, kind, at, False)
        self._salvaging = False
        return result

    def _value(self, value: Any, kind: Any, at: At, any_case: bool) -> Any:
        whole, metas = kind, []
        while get_origin(kind) is Annotated:
            kind, *more = get_args(kind)
            metas += more
        form = next((meta.extra.get("format") for meta in metas if isinstance(meta, msgspec.Meta) and meta.extra), None)
        origin, args = get_origin(kind), get_args(kind)

        if origin in (Union, types.UnionType):
            if value is None and type(None) in args:
                return None
            inner = [arg for arg in args if arg is not type(None)]
            if len(inner) == 1:
                return self._value(value, Annotated[(inner[0], *metas)] if metas else inner[0], at, any_case)
        if form is not None:
            return self._formatted(value, form, whole, at)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._struct(value, kind, at, any_case)
        if origin in (list, tuple, set, frozenset) and (origin is not tuple or args[1:] == (...,)):
            least = max((meta.min_length or 0 for meta in metas if isinstance(meta, msgspec.Meta)), default=0)
            return self._list(value, origin, args[0], at, any_case, least)
        if origin in (dict, Mapping):
            return self._dict(value, args, at, any_case)
        if origin is Literal:
            return self._choice(value, args, at)
        return self._leaf(value, whole, at)

    def _struct(self, value: Any, kind: type[msgspec.Struct], at: At, any_case: bool) -> Any:
        if value is None:
            value = {}  # `parameters:` with nothing behind it
        if not isinstance(value, dict):
            return self.report(at, f"expected a mapping, got {_describe(value)}")
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        spelled = {name.lower(): name for name in fields} if any_case else {name: name for name in fields}
        given: dict[str, str] = {}
        before, decoded = len(self.problems), {}
        for key, item in value.items():
            name = spelled.get(key.lower() if any_case else key)
            if name is None:
                self.report((*at, key), _unknown(key, fields))
            elif name in given:
                self.report((*at, key), f"means {name!r}, which is already given as {given[name]!r}")
            else:
                given[name] = key
                field = fields[name]
                if (item is None or (item == "" and any_case and _is_duration(field.type))) and not field.required:
                    continue  # null leaves the default, as in Go, and so does an empty duration in a plugin's parameters
                known = len(self.problems)
                decoded[field.name] = self._value(item, field.type, (*at, key), any_case)
                if decoded[field.name] is None and len(self.problems) > known:
                    del decoded[field.name]
        for name, field in fields.items():
            if field.required and name not in given:
                self.report(at, f"{name!r} is missing")
        if len(self.problems) > before and not self._salvaging:
            return None
        if any(field.required and field.name not in decoded for field in fields.values()):
            return None
        try:
            return kind(**decoded)
        except (ValueError, TypeError) as error:  # a struct's own __post_init__ refuses the combination
            return self.refuse(at, str(error))

    def _list(self, value: Any, make: Any, item: Any, at: At, any_case: bool, least: int) -> Any:
        if not isinstance(value, list):
            return self.report(at, f"expected a list, got {_describe(value)}")
        if len(value) < least:
            return self.report(at, f"expected a list of at least {least}, got {len(value) or 'an empty one'}")
        return make(self._value(entry, item, (*at, index), any_case) for index, entry in enumerate(value))

    def _dict(self, value: Any, args: tuple[Any, ...], at: At, any_case: bool) -> Any:
        if not isinstance(value, dict):
            return self.report(at, f"expected a mapping, got {_describe(value)}")
        return {
            self._leaf(key, args[0], (*at, key), lax=True): self._value(entry, args[1], (*at, key), any_case)
            for key, entry in value.items()
        }

    def _choice(self, value: Any, choices: tuple[Any, ...], at: At) -> Any:
        if value in choices:
            return value
        near = did_you_mean(str(value), [str(choice) for choice in choices])
        return self.report(at, f"expected one of {', '.join(map(repr, choices))}, got {value!r}{near}")

    def _formatted(self, value: Any, form: str, whole: Any, at: At) -> Any:
        try:
            if form == "duration":
                if not isinstance(value, str):
                    raise ValueError(f"expected a duration such as '200ms' or '5s', got {_describe(value)}")
                value, text = seconds(value), value
                if value < 0:
                    raise ValueError(f"expected a duration that is not negative, got {text!r}")
            elif form == "quantity":
                value = amount(value)
            elif form == "path" and isinstance(value, str):
                value = self.resolve(value)
            elif form == "model" and isinstance(value, str):
                value = self._model_directory(value)
        except ValueError as error:
            return self.report(at, str(error))
        except OverflowError:
            return self.report(at, TOO_LARGE)
        return self._leaf(value, whole, at)

    def _model_directory(self, name: str) -> str:
        path = self.resolve(name)
        if os.path.isdir(path):
            return path
        try:
            return str(find_model_directory(name))
        except FileNotFoundError:
            return path  # whoever uses it says what is wrong with it

    def _leaf(self, value: Any, kind: Any, at: At, *, lax: bool = False) -> Any:
        try:
            decoded = msgspec.convert(value, kind, strict=not lax)
            if isinstance(decoded, float) and not math.isfinite(decoded):
                return self.report(at, f"expected a finite number, got {decoded}")
            if isinstance(decoded, int) and not -LARGEST <= decoded <= LARGEST:
                return self.report(at, TOO_LARGE)
            return decoded
        except msgspec.ValidationError as error:
            message, _, inside = str(error).partition(" - at `$")
            message = message.replace("`", "")
            if not inside and (types_ := re.fullmatch(r"Expected ([a-z| ]+), got [a-z]+", message)):
                return self.report(at, _expected(types_[1].split(" | "), at, value))
            wrong = f"{message[0].lower()}{message[1:]}"
            where = f" (at {inside.rstrip('`')})" if inside else ""
            return self.report(at, f"{wrong}: {value!r}{where}")


def _is_duration(kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        inner, *metas = get_args(kind)
        formats = [meta.extra for meta in metas if isinstance(meta, msgspec.Meta) and meta.extra]
        return {"format": "duration"} in formats or _is_duration(inner)
    return get_origin(kind) in (Union, types.UnionType) and any(map(_is_duration, get_args(kind)))


def _unknown(key: str, fields: Mapping[str, Any]) -> str:
    if not fields:
        return "not a known key: nothing can be set here"
    near = did_you_mean(key, fields)
    return f"not a known key{near}" if near else f"not a known key; known are {', '.join(sorted(fields))}"


def _expected(kinds: Sequence[str], at: At, value: Any) -> str:
    """What a value of another type should have been, in the words of people who write YAML."""
    key = next((part for part in reversed(at) if isinstance(part, str)), "")
    unit = " of milliseconds, without a unit" if key.endswith("Ms") or key.lower().endswith("_ms") else ""
    names = {"int": f"a whole number{unit}", "float": f"a number{unit}", "bool": "true or false", "str": "text"}
    wanted = " or ".join(names.get(kind, kind) for kind in kinds if kind != "null")
    hint = ""
    if isinstance(value, str) and "int" in kinds and value.isdecimal():
        hint = "; write it without quotes"
    elif isinstance(value, int | float) and kinds[0] == "str":
        hint = "; write it in quotes"
    return f"expected {wanted}, got {_describe(value)}{hint}"


def _describe(value: Any) -> str:
    names: dict[type, str] = {dict: "a mapping", list: "a list", type(None): "nothing"}
    return names.get(type(value), repr(value))
