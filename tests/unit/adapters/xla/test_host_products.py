"""How Eigen splits products, against allocations that were seen (two threads)."""

import pytest

from memfit.adapters.xla.host_products import Product, split_product


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "tasks_bytes", "fixed_bytes"),
    [
        # Two slices of both operands, 320 deep at most.
        (1024, 4096, 1024, 1024 * 640 * 4, 1024 * 640 * 4),
        (3072, 1024, 1024, 3072 * 512 * 4, 1024 * 512 * 4),
        (256, 4096, 4096, 256 * 640 * 4, 4096 * 640 * 4),
        # A sum that is one slice.
        (512, 256, 512, 512 * 256 * 4, 512 * 256 * 4),
        # So many rows that each thread packs its own.
        (3328, 1024, 1024, 0, 1024 * 512 * 4 + 2 * 216 * 256 * 4),
    ],
)
def test_products_pack_slices_of_their_operands(rows, depth, columns, tasks_bytes, fixed_bytes):
    found = split_product(rows, depth, columns, 4, 2)

    assert (found.tasks_bytes, found.fixed_bytes) == (tasks_bytes, fixed_bytes)


@pytest.mark.parametrize(
    ("rows", "depth", "num_tasks", "share"),
    [
        # One group of a convolution with groups, 49 x 49 pixels of 32 images: a quarter was packed as it began.
        (76832, 9, 4, 3 * 7056 / 76832),
        # 27 x 27 pixels of 16 images: three of five blocks.
        (11664, 25, 2, 3 * 2544 / 11664),
    ],
)
def test_tasks_are_as_many_blocks_as_take_some_time(rows, depth, num_tasks, share):
    found = split_product(rows, depth, 1, 4, 2, load_cycles=20.0)

    assert (found.num_tasks, found.task_share) == (num_tasks, pytest.approx(share))
    assert found.tasks_bytes == rows * depth * 4


def test_columns_are_dealt_where_there_are_too_few_rows():
    found = split_product(4, 1024, 8192, 4, 2)

    # THEN all columns are what threads share, and the few rows are packed once
    assert found.fixed_bytes < 8192 * 512 * 4
    assert found.num_tasks > 2


def test_nothing_to_multiply_packs_nothing():
    assert split_product(0, 8, 8, 4, 2) == split_product(8, 0, 8, 4, 2) == Product()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_small_products_are_not_split(num_threads):
    # THEN a block of each operand is packed, by the thread that computes it
    packed = (8 + 32) * 16 * 4
    assert split_product(8, 16, 32, 4, num_threads) == Product(fixed_bytes=packed, asked_bytes=packed)


def test_one_thread_has_nothing_to_share():
    found = split_product(4096, 4096, 4096, 4, 1)

    packed = 2 * 216 * 320 * 4
    assert found == Product(fixed_bytes=packed, asked_bytes=packed)


@pytest.mark.parametrize(
    ("rows", "columns", "element_bytes", "allocated"),
    [
        (4096, 64, 4, 8601664 + 442432),
        (64, 4096, 4, 9142336),
        (4096, 64, 8, 21463104 + 491584),
        (64, 4096, 8, 21463104 + 491584),
    ],
)
def test_what_is_asked_for_is_at_least_what_was_seen_and_little_more(rows, columns, element_bytes, allocated):
    # WHEN threads pack for themselves, so that hardly anything of it is touched
    found = split_product(rows, 512, columns, element_bytes, 2)

    assert 0.99 * allocated <= found.asked_bytes <= 1.06 * allocated
    assert found.tasks_bytes + found.fixed_bytes < found.asked_bytes / 8


@pytest.mark.parametrize(("num_threads", "rows"), [(2, 3328), (8, 8 * 4 * 216)])
def test_the_more_threads_there_are_the_fewer_tasks_each_needs_to_pack_for_itself(num_threads, rows):
    many, few = (split_product(number, 1024, 4096, 4, num_threads) for number in (rows, rows - 3 * 216))

    assert many.tasks_bytes == 0 < few.tasks_bytes


def test_a_product_has_no_more_threads_than_it_is_worth():
    # THEN it is split for ten threads or so, not for all
    assert split_product(256, 256, 256, 4, 64) == split_product(256, 256, 256, 4, 32)
    assert split_product(256, 256, 256, 4, 64).num_tasks > 1
