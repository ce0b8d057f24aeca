import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.estimator.scaling import fit, needs_third

# (constant, linear, quadratic) bytes of a block: whole numbers of elements of 1 to 8 bytes.
polynomials = st.tuples(st.integers(0, 2**34), st.integers(0, 2**26), st.integers(0, 2**12))
# A block has one reason to be: weights, or rows times something, or pairs of rows.
kinds = st.sampled_from([(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
sizes = st.integers(2, 64)
targets = st.integers(1, 4096)


def timeline(polynomials, n, ops=None):
    blocks = tuple(
        Block(
            a + b * n + c * n * n, i, None, Category.ACTIVATION, Phase.FORWARD, "m", ops[i] if ops else "op", "f.py:1"
        )
        for i, (a, b, c) in enumerate(polynomials)
    )
    return Timeline(blocks, len(blocks))


def family(polynomials, n):
    first, second = (n, timeline(polynomials, n)), (2 * n, timeline(polynomials, 2 * n))
    if needs_third(first, second):
        return fit(first, second, (3 * n, timeline(polynomials, 3 * n)))
    return fit(first, second)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**30)), max_size=8), sizes, targets)
def test_what_is_linear_is_exact_from_two(terms, n, target):
    # GIVEN blocks that are constant or grow with the batch
    blocks = [(a, b, 0) for a, b in terms]

    # THEN two traces give every other batch size to the byte
    first, second = (n, timeline(blocks, n)), (2 * n, timeline(blocks, 2 * n))
    assert not needs_third(first, second)
    assert fit(first, second).at(target) == timeline(blocks, target)


@given(st.lists(st.tuples(polynomials, kinds), max_size=8), sizes, targets)
def test_what_is_quadratic_is_noticed_and_exact(drawn, n, target):
    blocks = [tuple(x * y for x, y in zip(terms, kind, strict=True)) for terms, kind in drawn]

    assert family(blocks, n).at(target) == timeline(blocks, target)


@given(st.lists(polynomials, max_size=8), sizes, targets)
def test_three_traces_settle_every_quadratic(blocks, n, target):
    made = fit(*((k * n, timeline(blocks, k * n)) for k in (1, 2, 3)))

    assert made.at(target) == timeline(blocks, target)


@given(st.lists(polynomials, min_size=1, max_size=8), sizes)
def test_the_traces_themselves_are_given_back(blocks, n):
    made = family(blocks, n)

    assert made.at(n) == timeline(blocks, n)
    assert made.at(2 * n) == timeline(blocks, 2 * n)


@pytest.mark.parametrize(
    "other",
    [
        timeline([(1, 0, 0)], 4),
        timeline([(1, 0, 0), (0, 2, 0)], 4, ops=["op", "another"]),
        Timeline(timeline([(1, 0, 0), (0, 2, 0)], 4).blocks, 3),
    ],
    ids=["fewer blocks", "other operator", "other length"],
)
def test_steps_that_differ_have_no_family(other):
    assert fit((2, timeline([(1, 0, 0), (0, 2, 0)], 2)), (4, other)) is None


def test_a_size_is_never_negative():
    # GIVEN a block that shrinks as the batch grows
    first, second = timeline([(100, 0, 0)], 2), timeline([(10, 0, 0)], 4)

    assert fit((2, first), (4, second)).at(1000).blocks[0].size_bytes == 0


def test_where_blocks_come_from_is_kept():
    block = fit((2, timeline([(0, 3, 0)], 2)), (4, timeline([(0, 3, 0)], 4))).at(10).blocks[0]

    assert (block.module, block.op, block.source, block.category) == ("m", "op", "f.py:1", Category.ACTIVATION)
