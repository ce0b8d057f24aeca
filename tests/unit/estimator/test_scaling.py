import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.estimator.scaling import fit

# (constant, linear, quadratic, cubic) bytes of a block: whole numbers of elements of 1 to 8 bytes.
polynomials = st.tuples(st.integers(0, 2**34), st.integers(0, 2**26), st.integers(0, 2**12), st.integers(0, 2**4))
# A block has one reason to be: weights, or rows times something, or pairs or triples of rows.
kinds = st.sampled_from([(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 1, 1, 0), (0, 0, 0, 1), (0, 0, 1, 1)])
sizes = st.integers(2, 64)
targets = st.integers(1, 4096)


def timeline(polynomials, n, ops=None, category=Category.ACTIVATION):
    blocks = tuple(
        Block(
            sum(term * n**power for power, term in enumerate(terms)),
            i,
            None,
            category,
            Phase.FORWARD,
            "m",
            ops[i] if ops else "op",
            "f.py:1",
        )
        for i, terms in enumerate(polynomials)
    )
    return Timeline(blocks, len(blocks))


def family(polynomials, n):
    """(the family through as many traces as it takes, their number)."""
    traces = [(n, timeline(polynomials, n))]
    made = None
    while made is None or not made.is_settled:
        size = (len(traces) + 1) * n
        traces.append((size, timeline(polynomials, size)))
        made = fit(*traces)
    return made, len(traces)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**30)), max_size=8), sizes, targets)
def test_what_is_linear_is_exact_from_two(terms, n, target):
    # GIVEN blocks that are constant or grow with the batch
    made, num_traces = family(terms, n)

    # THEN two traces give every other batch size to the byte
    assert num_traces == 2
    assert made.at(target) == timeline(terms, target)


@given(st.lists(st.tuples(polynomials, kinds), max_size=8), sizes, targets)
def test_what_grows_faster_is_noticed_and_exact(drawn, n, target):
    blocks = [tuple(x * y for x, y in zip(terms, kind, strict=True)) for terms, kind in drawn]

    made, num_traces = family(blocks, n)

    assert made.at(target) == timeline(blocks, target)
    # One trace more than the polynomial takes.
    assert num_traces <= 5


@given(st.lists(polynomials, max_size=8), sizes, targets)
def test_five_traces_settle_every_cubic(blocks, n, target):
    made = fit(*((k * n, timeline(blocks, k * n)) for k in (1, 2, 3, 4, 5)))

    assert made.is_settled
    assert made.at(target) == timeline(blocks, target)


def test_a_cube_is_told_from_a_square():
    """Three traces go through both."""
    cube = [(0, 0, 0, 8)]
    three = fit(*((n, timeline(cube, n)) for n in (32, 64, 96)))
    assert not three.is_settled
    assert fit(*((n, timeline(cube, n)) for n in (32, 64, 96, 128, 160))).at(48) == timeline(cube, 48)


def test_what_is_no_polynomial_stays_open():
    """The capacity of experts, for example: whole samples, of five quarters of the even share."""

    def rounded(n):
        return timeline([(4 * (5 * n // 16),)], n)

    assert not fit(*((n, rounded(n)) for n in (8, 16, 24, 32, 40))).is_settled


def test_scratch_memory_lies_between_the_first_two_traces():
    steps = {8: 100, 16: 300, 24: 500, 32: 1700}
    made = fit(*((n, timeline([(size,)], n, category=Category.WORKSPACE)) for n, size in steps.items()))
    assert made.is_settled
    assert made.at(12).blocks[0].size_bytes == 200


@given(st.lists(polynomials, min_size=1, max_size=8), sizes)
def test_the_traces_themselves_are_given_back(blocks, n):
    made = fit((n, timeline(blocks, n)), (2 * n, timeline(blocks, 2 * n)))

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
