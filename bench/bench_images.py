"""What an image costs the router, the first time and in every later turn: `python -m bench.bench_images`.

Photo-like JPEGs of random content; CPU of the whole process, median of five images each.
"""

import base64
import io
import statistics
import time

import numpy as np
from PIL import Image

from tokenization.images import ImageReader
from tokenization.vision_grid import VisionGrid

SIZES = ((320, 240), (1024, 768), (2048, 1536), (4032, 3024))
IMAGES = 5
QUALITY = 85
GRAIN = 20
"""Noise on the colours, so that the files have the size of photographs."""


def photograph(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A JPEG of coloured patches with grain."""
    patches = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)).resize(
        (width, height)
    )
    pixels = np.asarray(patches).astype(np.int16) + rng.integers(-GRAIN, GRAIN, (height, width, 3), dtype=np.int16)
    with io.BytesIO() as buffer:
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=QUALITY)
        return buffer.getvalue()


def main() -> None:
    rng = np.random.default_rng(1)
    print(f"{'pixels':>12} {'KiB':>6} {'tokens':>7} {'new, ms':>8} {'known, ms':>10}")
    for width, height in SIZES:
        reader = ImageReader(VisionGrid(max_pixels=12_845_056))
        new: list[float] = []
        known: list[float] = []
        size = 0
        for _ in range(IMAGES):
            data = photograph(rng, width, height)
            url, size = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}", len(data)
            for spent in (new, known):
                started = time.process_time()
                reader.place(url, None, "model")
                spent.append((time.process_time() - started) * 1e3)
        tokens = reader.grid.tokens(width, height)
        cost = f"{statistics.median(new):8.1f} {statistics.median(known):10.2f}"
        print(f"{width:>7}x{height:<4} {size // 1024:6} {tokens:7} {cost}")


if __name__ == "__main__":
    main()
