"""Numbers onto 0..1, as the score formulas share it."""

import numpy as np

from fleet.extremes import largest, smallest
from fleet.fleet import Vector


def fewest_first(values: Vector) -> Vector:
    """1 for the smallest, 0 for the largest, linear between; 1 for all where all are equal."""
    low, high = smallest(values), largest(values)
    return np.ones(len(values)) if low == high else (high - values) / (high - low)
