"""Which rank may have which stages: loops of one or more rounds, the last one perhaps incomplete, and a V."""

from __future__ import annotations

from itertools import chain


def placements(num_ranks: int, num_units: int, most_rounds: int = 3) -> list[tuple[int, ...]]:
    """Returns the placements to search, the rank of each stage, of at most `num_units` stages.

    An incomplete last round gives the first ranks a stage more than the others, such as (0, 1, 0): with an end of the
    model as a short first or last stage that evens out ranks whose work can't be divided equally.
    """
    loop = list(range(num_ranks))
    lengths = chain.from_iterable(_lengths(num_ranks, rounds) for rounds in range(1, most_rounds + 1))
    loops = [tuple(loop * (length // num_ranks + 1))[:length] for length in lengths]
    v_shape = (*loop, *reversed(loop))
    found = dict.fromkeys([*loops, v_shape] if num_ranks > 1 else [(0,)])
    return [placement for placement in found if len(placement) <= num_units]


def _lengths(num_ranks: int, rounds: int) -> list[int]:
    return [rounds * num_ranks, rounds * num_ranks + 1]
