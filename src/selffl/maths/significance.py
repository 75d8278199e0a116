"""Whether a mean difference over repeats is statistically significant, alone and among several.

The corrected resampled t test: C. Nadeau and Y. Bengio, "Inference for the Generalization Error", Machine Learning 52,
2003.  Holm's correction: S. Holm, "A Simple Sequentially Rejective Multiple Test Procedure",
Scandinavian Journal of Statistics 6, 1979.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LEVEL = 0.05  # below which a p-value is called statistically significant
FRESH_DRAWS = 0.0  # test rows per training row, of repeats that share no rows: the plain paired t test


def resampled_error(standard_error: float, num_repeats: int, test_per_train: float) -> float:
    """Standard error of a mean over ``num_repeats`` J splits of the same rows into training and test rows.

    Nadeau and Bengio 2003: the variance of the mean is (1/J + n_test/n_train) s^2 in place of s^2/J, since
    splits of the same rows overlap, and what they show is correlated.  ``standard_error`` is s/sqrt(J), and
    ``test_per_train`` is n_test/n_train, or `FRESH_DRAWS` where repeats are independent.
    """
    return standard_error * math.sqrt(1.0 + num_repeats * test_per_train)


def paired_p_value(mean: float, standard_error: float, num_repeats: int, *, test_per_train: float) -> float:
    """Two-sided p-value of a mean of zero, by Student's t with J - 1 degrees of freedom; NaN where there is no test.

    Repeats without any spread decide at once: 1 at a mean of zero, else 0.
    """
    error = resampled_error(standard_error, num_repeats, test_per_train)
    if num_repeats < 2 or math.isnan(error) or math.isnan(mean):
        return math.nan
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    from scipy.special import stdtr  # here: 16 MB of every process that only trains

    return float(2 * stdtr(num_repeats - 1, -abs(mean) / error))


def holm_p_values(p_values: Sequence[float]) -> list[float]:
    """P-values after Holm's correction: below a level, they keep the chance of *any* false positive below it.

    The k-th smallest of n, from k = 0, is multiplied by n - k, and none is below a smaller one's, nor above 1.  NaN
    stands for a comparison without a test: it stays, and counts for nothing.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    corrected, largest = [math.nan] * len(p_values), 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min((len(order) - rank) * p, 1.0))
        corrected[index] = largest
    return corrected
