"""What divides a number, for messages that name a value that works."""

_LARGEST_TRIED = 2**20


def divisors(number: int) -> list[int]:
    """The divisors of ``number`` >= 1 in ascending order, within about a tenth of a second however large it is.

    All of them up to 2^40. Of larger numbers, what no factor up to 2^20 divides any further is taken for a prime.
    """
    found, rest, factor = [1], number, 2
    while factor * factor <= rest and factor <= _LARGEST_TRIED:
        power, smaller = 1, found
        while rest % factor == 0:
            rest //= factor
            power *= factor
            found = found + [divisor * power for divisor in smaller]
        factor += 1 if factor == 2 else 2
    if rest > 1:
        found = found + [divisor * rest for divisor in found]
    return sorted(found)


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of ``number``, the nearest to ``wanted`` first; of two as near, the smaller."""
    return sorted(divisors(number), key=lambda divisor: abs(divisor - wanted))
