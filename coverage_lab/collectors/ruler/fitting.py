"""The largest haystack that a prompt of so many tokens holds, found with few calls of a tokenizer."""

from collections.abc import Callable

_PROBE = 16  # units beyond the fewest, to learn how long a unit is
_LEAST_PER_UNIT = 0.25  # tokens
_LEAP = 32  # times as many units at most, since short calls are quick and tell where to go
_INTERPOLATED = 8  # calls after which the range is halved instead


def fit(tokens: Callable[[int], int], target: int, fewest: int, most: int | None = None) -> tuple[int, int]:
    """Return how many units give the longest prompt of at most `target` tokens, and its length.

    The length is taken to grow evenly, so that most places are guessed from two others. The search
    ends when one unit more is too long, or what is left is less than a thousandth of the target.

    Parameters
    ----------
    tokens : callable
        Length of the prompt with so many units.
    target : int
    fewest : int
        Least units there must be; their length is returned even where it is above the target.
    most : int, optional
        Most units there are.
    """
    units, held = fewest, tokens(fewest)
    calls, per_unit = 1, 0.0
    above: int | None = None
    above_held = 0
    close = target // 1000
    while target - held > close and units != most and (above is None or above - units > 1):
        room = target - close // 2 - held
        if above is None:
            further = int(room / per_unit) if per_unit else _PROBE
            guess = units + min(max(1, further), _LEAP * max(1, units))
            guess = guess if most is None else min(guess, most)
        elif calls < _INTERPOLATED:
            even = (above - units) * room // (above_held - held)
            guess = min(units + max(1, even), above - 1)
        else:
            guess = (units + above) // 2
        length = tokens(guess)
        calls += 1
        if above is None:
            per_unit = max((length - held) / (guess - units), _LEAST_PER_UNIT)
        if length <= target:
            units, held = guess, length
        else:
            above, above_held = guess, length
    return units, held
