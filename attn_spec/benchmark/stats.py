"""The statistics of paired log-ratios: interval of the median, a sign test, Holm's correction, geometric mean."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence


def median(values: Sequence[float]) -> float:
    """The middle value, the mean of the two middle ones where their number is even. Raises ValueError without any."""
    return quantile(values, 0.5)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies, linear between neighbours. Raises ValueError without any."""
    if not values:
        raise ValueError("values: there are none; measure at least one pair")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def at_least(successes: int, trials: int, share: float) -> float:
    """The probability of so many successes or more in independent trials that each succeed with probability share."""
    terms = (math.comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(successes, trials + 1))
    return min(1.0, math.fsum(terms))


def bootstrap_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The percentile bootstrap interval of the median, worked out exactly and not by drawing.

    The median of n values drawn with replacement is at most the k-th smallest of n when at least half of the draws are:
    a binomial probability (Efron, 1979; Maritz and Jarrett, 1978). So the interval is two of the values themselves, and
    is the same each time: the innermost two that it lies on or beyond with at most the error allowed on each side. (One
    value further in, the usual quantiles hold only 90 % of the time at n = 23.) Where n is even, the lower of the two
    middle draws counts below and the upper one above. The whole range where n is too small for more.
    """
    if not values:
        raise ValueError("values: there are none; measure at least one pair")
    ordered, n, tail = sorted(values), len(values), (1 - confidence) / 2
    lower, upper = (n + 1) // 2, n // 2 + 1
    places = range(1, n + 1)
    low = bisect.bisect_right(places, tail, key=lambda k: at_least(lower, n, k / n))
    high = bisect.bisect_left(places, 1 - tail, key=lambda k: at_least(upper, n, (k - 1) / n)) + 1
    return ordered[max(low, 1) - 1], ordered[min(high, n) - 1]


def sign_p(values: Sequence[float], limit: float, *, above: bool) -> float:
    """The probability that so many values lie above (or below) a limit by chance, were the limit their median.

    Exact for any distribution. The bootstrap gives 0 as soon as all values lie on one side, be they three.
    """
    beyond = sum(x > limit if above else x < limit for x in values)
    return at_least(beyond, len(values), 0.5)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values corrected for how many there are (Holm, 1979): the chance of even one false alarm is what is held."""
    corrected: dict[str, float] = {}
    largest = 0.0
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - place)))
        corrected[name] = largest
    return corrected


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean that gives the same whichever of the two is the baseline. Raises ValueError without any."""
    if not ratios:
        raise ValueError("ratios: there are none to average")
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent n of y = c x^n, by least squares on the logarithms of two or more positive points."""
    if len(set(x)) < 2 or min(*x, *y) <= 0:
        raise ValueError("slope: needs points at two or more different sizes, all above 0")
    u, v = [math.log(a) for a in x], [math.log(b) for b in y]
    mean_u, mean_v = math.fsum(u) / len(u), math.fsum(v) / len(v)
    covariance = math.fsum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True))
    return covariance / math.fsum((a - mean_u) ** 2 for a in u)
