from memfit.allocator.pool import FREE, IN_USE, Pool, PoolBlock


def chain(pool: Pool, *sizes: int) -> list[PoolBlock]:
    """Neighbouring blocks in use."""
    blocks: list[PoolBlock] = []
    address = 0
    for size in sizes:
        block = PoolBlock(pool, address, size, IN_USE)
        if blocks:
            block.link_after(blocks[-1])
        blocks.append(block)
        address += size
    return blocks


def new_pool() -> Pool:
    return Pool(page_bytes=2048, split_remainder_bytes=512, split_below_bytes=1 << 40)


def test_free_blocks_are_ordered_by_size_then_address() -> None:
    # GIVEN blocks at 0, 1024, 1536, 2048; none neighbours of a free one
    pool = new_pool()
    blocks = chain(pool, 1024, 512, 512, 1024)

    # WHEN
    for block in (blocks[3], blocks[0]):
        pool.insert(block)
    pool.insert(blocks[2])

    # THEN
    assert [(b.size, b.address) for b in pool.free_blocks()] == [(512, 1536), (1024, 0), (1024, 2048)]


def test_a_freed_block_joins_both_free_neighbours() -> None:
    # GIVEN a chain a b c d with a and c free
    pool = new_pool()
    a, b, c, d = chain(pool, 512, 1024, 2048, 512)
    pool.insert_merged(a)
    pool.insert_merged(c)

    # WHEN b is freed
    pool.insert_merged(b)

    # THEN one block of 512 + 1024 + 2048 at address 0 remains, and d is its neighbour
    assert [(block.size, block.address) for block in pool.free_blocks()] == [(3584, 0)]
    assert b.prev is None
    assert b.next is d
    assert d.prev is b
    assert b.state == FREE


def test_a_freed_block_leaves_neighbours_in_use_alone() -> None:
    pool = new_pool()
    a, b, c = chain(pool, 512, 512, 512)

    pool.insert_merged(b)

    assert (b.prev, b.next, b.size) == (a, c, 512)


def test_a_removed_block_is_not_found() -> None:
    pool = new_pool()
    a, _, c = chain(pool, 512, 512, 512)
    pool.insert(a)
    pool.insert(c)

    pool.remove(a)

    assert pool.free_blocks() == [c]
    assert len(pool.keys) == len(pool.by_key) == 1


def test_absorbing_equals_merging() -> None:
    pool = new_pool()
    first, a, b, c, last = chain(pool, 512, 512, 1024, 2048, 512)

    b.absorb(a)
    b.absorb(c)

    assert (b.address, b.size, b.prev, b.next) == (512, 3584, first, last)
    assert first.next is last.prev is b


def test_a_block_is_born_when_it_is_inserted() -> None:
    pool = new_pool()
    (a,) = chain(pool, 512)
    pool.num_searches = 7

    pool.insert_merged(a)

    assert a.born == 7
