"""YAML text as plain values that remember where they stood.

`read` turns a document into dicts, lists and scalars and keeps, for every path in it, the line and column it came from, so
that a problem found much later can still point at its line. The scalars follow YAML's core schema (as JSON and Go read
them): `on`, `yes`, dates and 1:30 are strings, `1e8` is a number. A key that occurs twice in one mapping is an error. Aliases
and merge keys (`<<: *name`) work as they do in Go.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import yaml

Key: TypeAlias = str | int
At: TypeAlias = tuple[Key, ...]
"""A path inside a document: keys and list positions from the root."""

MAX_NODES = 200_000
"""More values than any configuration has; ends the expansion of nested aliases."""


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong (or, as a warning, odd) and where."""

    file: str
    at: At
    message: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        where = render(self.at)
        return f"{place}: {where}: {self.message}" if where else f"{place}: {self.message}"


class ConfigError(Exception):
    """A configuration that cannot be used, with everything that was found wrong with it."""

    def __init__(self, problems: Sequence[Problem], warnings: Sequence[Problem] = ()) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = list(problems)
        self.warnings = list(warnings)


class Source(msgspec.Struct, frozen=True):
    """A document: its values, and the (line, column) of each path, counted from 1."""

    file: str
    value: Any
    places: dict[At, tuple[int, int]]

    def problem(self, at: At, message: str) -> Problem:
        """A problem at `at`, on the line of the nearest thing that is written in the document."""
        for length in range(len(at), -1, -1):
            if place := self.places.get(at[:length]):
                return Problem(self.file, at, message, *place)
        return Problem(self.file, at, message)


def render(at: At) -> str:
    """`("plugins", 2, "pluginRef")` as `plugins[2].pluginRef`."""
    text = ""
    for key in at:
        if isinstance(key, int):
            text += f"[{key}]"
        elif re.fullmatch(r"[\w-]+", key):
            text += f".{key}" if text else key
        else:
            text += f"[{key!r}]"
    return text


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    return lower[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known word, or nothing."""
    meant = nearest(word, known)
    return f"; did you mean {meant!r}?" if meant else ""


def read_file(path: Path) -> Source:
    """The document in `path`. Raises ConfigError where it cannot be read or is not YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([Problem(str(path), (), f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(str(path), (), f"is not UTF-8: byte {error.start} is {error.reason}")]) from error
    return read(text, str(path))


def read(text: str, file: str) -> Source:
    """The document in `text`; `file` is what messages call it. Raises ConfigError."""
    try:
        root = yaml.compose(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        raise ConfigError([Problem(file, (), f"not YAML: {_syntax(error)}", line, column)]) from error
    except yaml.YAMLError as error:  # the reader's errors carry no mark
        raise ConfigError([Problem(file, (), f"not YAML: {error}")]) from error
    except RecursionError as error:
        raise ConfigError([Problem(file, (), "nested too deeply")]) from error
    walk = _Walk(file)
    value = None if root is None else walk.value(root, ())
    if walk.problems:
        raise ConfigError(walk.problems)
    return Source(file, value, walk.places)


def _syntax(error: yaml.MarkedYAMLError) -> str:
    """What is wrong with the text, and what would be right where that is known."""
    problem = error.problem or ""
    since = f" that begins on line {error.context_mark.line + 1}" if error.context_mark else ""
    if "'\\t'" in problem:
        return "a tab; indent with spaces"
    if problem.startswith("expected <block end>"):
        found = problem.rpartition("found ")[2]
        what = {"'<scalar>'": "text", "'?'": "a key", "'<block mapping start>'": "a key"}.get(found, found)
        return f"{what} does not fit here, in the block{since}: indent it like the lines it belongs to"
    if problem == "mapping values are not allowed here":
        return "no key may stand here: indent the line like the lines it belongs to, and quote text that contains ': '"
    if problem.startswith("could not find expected ':'"):
        return f"a key{since} has no ':' behind it"
    if error.context and error.context.startswith("expected a single document"):
        return "a second document begins here ('---'); one file holds one configuration"
    return ", ".join(part for part in (error.context, problem) if part)


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the resolvers of YAML 1.2's core schema instead of 1.1's."""


_CoreLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


class _Walk:
    """One pass over the node graph: values, places, duplicate keys."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[At, tuple[int, int]] = {}
        self.problems: list[Problem] = []
        self._nodes = 0
        self._open: set[int] = set()

    def value(self, node: yaml.Node, at: At) -> Any:
        self.places.setdefault(at, (node.start_mark.line + 1, node.start_mark.column + 1))
        self._count(node, at)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, at)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*at, index)) for index, item in enumerate(node.value)]
            return self._mapping(node, at)
        finally:
            self._open.discard(id(node))

    def _count(self, node: yaml.Node, at: At) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES or id(node) in self._open:
            why = "refers to itself" if id(node) in self._open else f"expands to more than {MAX_NODES} values"
            raise ConfigError([self._problem(node, at, f"an alias here {why}")])

    def _mapping(self, node: yaml.Node, at: At) -> dict[str, Any]:
        seen: dict[str, int] = {}
        result: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if _merges(key_node):
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(self._problem(key_node, at, "a key must be plain text"))
                continue
            key, line = str(key_node.value), key_node.start_mark.line + 1
            here = (*at, key)
            if key in seen:
                self.problems.append(self._problem(key_node, here, f"written twice, first on line {seen[key]}"))
                continue
            seen[key] = line
            self.places[here] = (line, key_node.start_mark.column + 1)
            result[key] = self.value(value_node, here)
        for other in merged:
            self._merge(other, result, at)
        return result

    def _merge(self, node: yaml.Node, result: dict[str, Any], at: At) -> None:
        """Add what a mapping has and `result` has not."""
        self._count(node, at)
        if not isinstance(node, yaml.MappingNode):
            self.problems.append(self._problem(node, at, "'<<' must be followed by a mapping or a list of mappings"))
            return
        self._open.add(id(node))
        try:
            for key, value in self._mapping(node, at).items():
                result.setdefault(key, value)
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode, at: At) -> Any:
        kind, text = node.tag.removeprefix("tag:yaml.org,2002:"), node.value
        try:
            match kind:
                case "str":
                    return text
                case "null":
                    return None
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    digits = text.lstrip("+-0") or "0"
                    return int(text, 0) if text[:2] in ("0o", "0x") else int(digits) * (-1 if text[0] == "-" else 1)
                case "float":
                    return float(
                        text.replace(".inf", "inf")
                        .replace(".Inf", "inf")
                        .replace(".INF", "inf")
                        .lower()
                        .replace(".nan", "nan")
                    )
            message = f"the tag {node.tag!r} is not known; write a plain value"
        except (ValueError, LookupError):  # what an explicit tag promises, or a number of thousands of digits
            message = f"{text[:40]!r} cannot be read as {kind}"
        self.problems.append(self._problem(node, at, message))
        return None

    def _problem(self, node: yaml.Node, at: At, message: str) -> Problem:
        return Problem(self.file, at, message, node.start_mark.line + 1, node.start_mark.column + 1)


def _merges(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode) and key.value == "<<" and key.style is None
