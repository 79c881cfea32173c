"""Whatever a document says, loading it ends in a configuration or in a ConfigError with places; nothing else."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import load_text
from gateway.config_source import ConfigError

FOLDERS = (Path(__file__).parents[1] / "data" / "llmd", Path(__file__).parents[2] / "configs")
FILES = sorted(path for folder in FOLDERS for path in folder.glob("*.yaml"))
JUNK: tuple[Any, ...] = (
    None,
    0,
    -1,
    1.5,
    True,
    "",
    "x",
    "queue-scorer",
    "5s",
    [],
    {},
    [None],
    [[]],
    {"a": 1},
    {"type": 3},
    "\x00",
    float("inf"),
    float("nan"),
    10**400,
    "-5s",
    "9" * 400 + "s",
    "9" * 400 + "Gi",
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    if isinstance(value, dict):
        found = [(value, key) for key in value]
        return found + [place for item in value.values() for place in places(item)]
    if isinstance(value, list):
        found = [(value, index) for index in range(len(value))]
        return found + [place for item in value for place in places(item)]
    return []


def spoil(document: Any, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(places(document))
        match rng.randrange(4):
            case 0:
                container[key] = copy.deepcopy(rng.choice(JUNK))
            case 1:
                del container[key]
            case 2 if isinstance(container, dict):
                container[rng.choice(["name", "type", "weight", "parameters", "nonsense", 7])] = rng.choice(JUNK)
            case _ if isinstance(container, list):
                container.insert(key, copy.deepcopy(rng.choice([*JUNK, container[key]])))
        if not places(document):
            return


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_spoiled_documents_are_refused_in_words(path: Path) -> None:
    rng = random.Random(path.stem)
    original = yaml.safe_load(path.read_text())
    for _ in range(40):
        document = copy.deepcopy(original)
        spoil(document, rng)
        text = yaml.safe_dump(document, sort_keys=False)
        refused: ConfigError | None = None
        try:
            load_text(text, str(path))
        except ConfigError as error:
            refused = error
        assert refused is None or all(problem.message for problem in refused.problems), text
        assert refused is None or refused.problems, text
