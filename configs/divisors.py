"""Divisors, for messages that name a value that works."""

from math import isqrt


def divisors(number: int) -> list[int]:
    """The divisors of ``number`` in ascending order; of one above 10^12, those up to 10^6 and their counterparts."""
    small = [divisor for divisor in range(1, min(isqrt(number), 10**6) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of ``number``, the nearest to ``wanted`` first; the smaller one of two that are equally near."""
    return sorted(divisors(number), key=lambda divisor: abs(divisor - wanted))
