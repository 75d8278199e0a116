"""How large a step may be: against the second moments of the recursion itself."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from selffl.maths.steps import largest_step

size = st.floats(0.01, 100.0)


def growth(rate, curvature, noise, momentum):
    """Spectral radius of one step's map of E e², E ev, E v²: v' = b v + h e, e' = e − η v', h random."""
    mean, square = curvature, curvature**2 + noise * curvature
    # h enters each product once or twice; v' and e' as (of e, of v) for a fixed h.
    terms = np.zeros((3, 3))
    for weight, power in ((1.0, 0), (mean, 1), (square, 2)):
        speed = {0: (0.0, momentum), 1: (1.0, 0.0)}  # by the power of h
        place = {0: (1.0, -rate * momentum), 1: (-rate, 0.0)}
        for one in (0, 1):
            other = power - one
            if other not in (0, 1):
                continue
            for row, (a, b) in enumerate(((place, place), (place, speed), (speed, speed))):
                (p, q), (r, s) = a[one], b[other]
                terms[row] += weight * np.array([p * r, p * s + q * r, q * s])
    return max(abs(np.linalg.eigvals(terms)))


@given(size, size, st.floats(0.0, 0.95))
def test_steps_below_the_largest_settle_and_those_above_do_not(curvature, noise, momentum):
    bound = float(largest_step(torch.tensor(curvature).double(), torch.tensor(noise).double(), momentum))
    assert growth(0.99 * bound, curvature, noise, momentum) < 1.0
    assert growth(1.01 * bound, curvature, noise, momentum) > 1.0
