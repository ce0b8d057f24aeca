import random
from itertools import pairwise

import pytest

from memfit.snapshots.alignment import align


def longest(first, second):
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for row, one in enumerate(first):
        for column, other in enumerate(second):
            table[row + 1][column + 1] = (
                table[row][column] + 1 if one == other else max(table[row][column + 1], table[row + 1][column])
            )
    return table[-1][-1]


# Tables that are kept whole, and halves of halves.
@pytest.mark.parametrize("most_bits", [1 << 29, 40, 6])
def test_it_is_a_longest_common_subsequence(most_bits):
    draw = random.Random(0)
    for _ in range(200):
        first, second = ([draw.randrange(5) for _ in range(draw.randrange(30))] for _ in range(2))

        pairs = align(first, second, most_bits=most_bits)

        assert len(pairs) == longest(first, second)
        assert all(first[one] == second[other] for one, other in pairs)
        assert all(one < later and other < after for (one, other), (later, after) in pairwise(pairs))


def test_rare_and_common_symbols_alike():
    first = [*range(100), *[7] * 50]

    pairs = align(first, [*range(50, 100), *[7] * 20])

    assert pairs[:50] == [(n, n - 50) for n in range(50, 100)]
    assert len(pairs) == 70


def test_nothing_in_common():
    assert align([1, 2], [3]) == align([], [1]) == []


def test_long_sequences_with_few_differences():
    # GIVEN a step of 300 sizes, fifty times, of which a few are missing
    draw = random.Random(1)
    sizes = [draw.randrange(40) for _ in range(300)] * 50
    kept = [size for size in sizes if draw.random() > 0.01]

    # THEN all others are found
    assert len(align(sizes, kept, most_bits=1 << 24)) == len(kept)
