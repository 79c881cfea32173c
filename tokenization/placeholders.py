"""One placeholder token per image becomes as many as the image has: ids and boundaries of a prompt before and after.

vLLM 0.32 replaces the first n occurrences of the placeholder's id in the prompt, in order, for n images. An occurrence that a
user's text spells out counts like any other, so occurrences and images are paired by number, not by where the template put
them.
"""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from tokenization.encoders import Ids
from tokenization.images import Placed
from tokenization.segments import Boundary
from tokenization.tokenized import Extra


class Expanded(msgspec.Struct, frozen=True):
    """A prompt with its images in their places."""

    token_ids: Ids
    boundaries: tuple[Boundary, ...]
    extras: tuple[Extra, ...]


def expand(
    ids: Ids, boundaries: Sequence[Boundary], placeholder: int, images: Sequence[Placed], *, more: bool = False
) -> Expanded:
    """The prompt in which the occurrences of the id `placeholder` stand for `images`, in order.

    `more`: there are further images, of which nothing is known: an occurrence that stands for one of them ends the prompt, at
    the last boundary before it. Otherwise further occurrences are ordinary tokens. Raises `ValueError` where there are fewer
    occurrences than images and no more are to come.
    """
    places = np.flatnonzero(ids == placeholder)
    if more and len(places) > len(images):
        unknown = int(places[len(images)])
        boundaries = [boundary for boundary in boundaries if boundary.tokens <= unknown]
        ids = ids[: boundaries[-1].tokens if boundaries else 0]
        places = places[places < len(ids)]
    if not more and len(places) < len(images):
        raise ValueError(f"{len(images)} images for {len(places)} placeholders in the prompt")
    known = list(zip(places[: len(images)].tolist(), images, strict=False))
    repeats = np.ones(len(ids), np.intp)
    extras, grown = [], 0
    for place, image in known:
        repeats[place] = image.tokens
        extras.append(Extra(image.identifier, place + grown, image.tokens))
        grown += image.tokens - 1
    return Expanded(np.repeat(ids, repeats), _moved(boundaries, known), tuple(extras))


def _moved(boundaries: Sequence[Boundary], known: Sequence[tuple[int, Placed]]) -> tuple[Boundary, ...]:
    """Boundaries counted in the new ids, under names in which the images before them have a part."""
    moved, passed, grown, seen = [], 0, 0, b""
    for boundary in boundaries:
        while passed < len(known) and known[passed][0] < boundary.tokens:
            image = known[passed][1]
            record = f"{image.tokens} {image.identifier}".encode()
            seen = hashlib.blake2b(seen + record, digest_size=16).digest()
            grown += image.tokens - 1
            passed += 1
        identity = boundary.identity
        if seen:
            identity = hashlib.blake2b(identity + seen, digest_size=16).digest()
        moved.append(Boundary(boundary.tokens + grown, identity))
    return tuple(moved)
