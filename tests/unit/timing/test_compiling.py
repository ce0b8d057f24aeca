from memfit.timing.compiling import compiled
from memfit.timing.table import Kind, table_of
from tests.unit.timing.operators import convolution, elementwise, product

MIB = 2**20


def test_chains_are_fused():
    # GIVEN three operators in a row between two products
    work = [product(64, 64, 64), *[elementwise(MIB)] * 3, product(64, 64, 64)]

    # WHEN compiled
    table = compiled(table_of(work))

    # THEN they are one kernel that reads and writes once
    assert table.kind.tolist() == [Kind.PRODUCT, Kind.ELEMENTWISE, Kind.PRODUCT]
    assert table.moved[1] == 2 * MIB


def test_products_stay_as_they_are():
    table = table_of([product(64, 64, 64)])
    assert compiled(table).moved.tolist() == table.moved.tolist()
    assert len(compiled(table_of([]))) == 0


def test_convolutions_are_laid_out_channels_last_by_the_rule():
    # Grouped ones are slower so.
    assert compiled(table_of([convolution(256, last=False)])).sizes[0, 7] == 1
    assert compiled(table_of([convolution(256, groups=32, last=False)])).sizes[0, 7] == 0
