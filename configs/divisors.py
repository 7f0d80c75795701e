"""Divisors of numbers, for error messages that suggest a valid value."""

from math import isqrt


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in ascending order. Above 10^12, only divisors up to 10^6 and their
    counterparts."""
    small = [divisor for divisor in range(1, min(isqrt(number), 10**6) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """Return the divisors of ``number``, nearest to ``wanted`` first; the smaller of two equally near ones first."""
    return sorted(divisors(number), key=lambda divisor: abs(divisor - wanted))
