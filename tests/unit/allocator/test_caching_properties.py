"""Invariants of the caching allocator on random timelines, and a slow model that it must agree with.

The model follows the rules in the plainest way: it keeps no free blocks at all, but computes them anew for every
request as the gaps between the used ranges, and searches them one by one.
"""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from memfit.allocator import replay
from memfit.core.replay import AllocatorOptions, OutOfMemory, Replay
from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.core.units import MIB


@dataclass
class Area:
    """Addresses from `base` on: a segment, or the address space of an expandable one with its mapped pages."""

    small: bool
    base: int
    num_bytes: int = 0
    pages: set[int] = field(default_factory=set)
    used: dict[int, int] = field(default_factory=dict)
    last_free: int = 0

    def mapped(self, page_bytes: int | None) -> list[tuple[int, int]]:
        """Maximal ranges with memory behind them."""
        if page_bytes is None:
            return [(0, self.num_bytes)]
        ranges: list[tuple[int, int]] = []
        for page in sorted(self.pages):
            if ranges and ranges[-1][1] == page * page_bytes:
                ranges[-1] = (ranges[-1][0], (page + 1) * page_bytes)
            else:
                ranges.append((page * page_bytes, (page + 1) * page_bytes))
        return ranges

    def gaps(self, page_bytes: int | None) -> list[tuple[int, int]]:
        """Maximal mapped ranges that aren't used."""
        found = []
        for begin, end in self.mapped(page_bytes):
            position = begin
            for start, size in sorted(self.used.items()):
                if begin <= start < end:
                    if start > position:
                        found.append((position, start))
                    position = start + size
            if end > position:
                found.append((position, end))
        return found


ENDLESS = 1 << 70


class SlowAllocator:
    """The rules of the allocator, with a linear search for everything."""

    def __init__(self, options: AllocatorOptions, capacity_bytes: int | None) -> None:
        self.options = options
        self.capacity = ENDLESS if capacity_bytes is None else capacity_bytes
        self.max_split = options.max_split_size_bytes or ENDLESS
        self.collects = options.garbage_collection_threshold > 0 and capacity_bytes is not None
        self.areas: list[Area] = []
        self.num_bases = 0
        self.searches = {True: 0, False: 0}
        self.retries = 0

    def page(self, small: bool) -> int | None:
        return (2 * MIB if small else 20 * MIB) if self.options.expandable_segments else None

    @property
    def reserved(self) -> int:
        return sum(area.num_bytes + len(area.pages) * (self.page(area.small) or 0) for area in self.areas)

    @property
    def allocated(self) -> int:
        return sum(sum(area.used.values()) for area in self.areas)

    def rounded(self, size: int) -> int:
        divisions = self.options.roundup_power2_divisions
        if divisions > 1 and size > 512 * divisions:
            power = 1
            while power * 2 <= size:
                power *= 2
            steps = [power + power // divisions * n for n in range(divisions + 1)]
            return min(step for step in steps if step >= size)
        return (size + 511) // 512 * 512

    def malloc(self, request: int) -> tuple[Area, int] | None:
        size = self.rounded(request)
        small = size <= MIB
        self.searches[small] += 1
        found = self.search(small, size) or self.grow(small, size)
        if found is None:
            return None
        area, begin, end = found
        remaining = end - begin - size
        if small or self.options.expandable_segments:
            splits = remaining >= 512
        else:
            splits = size < self.max_split and remaining > MIB
        area.used[begin] = size if splits else end - begin
        return area, begin

    def free(self, handle: tuple[Area, int]) -> None:
        area, begin = handle
        del area.used[begin]
        area.last_free = self.searches[area.small]

    def search(self, small: bool, size: int) -> tuple[Area, int, int] | None:
        fitting = [
            (end - begin, area.base + begin, area, begin, end)
            for area in self.areas
            if area.small == small
            for begin, end in area.gaps(self.page(small))
            if end - begin >= size
        ]
        fitting.sort(key=lambda gap: gap[:2])
        if not fitting:
            return None
        index = 0
        if self.options.expandable_segments:
            grown = [self.grown_bytes(gap[2], gap[3], gap[4]) for gap in fitting]
            while index + 1 < len(fitting) and grown[index + 1] < grown[index]:
                index += 1
        block_bytes, _, area, begin, end = fitting[index]
        if size < self.max_split <= block_bytes or (size >= self.max_split and block_bytes >= size + 20 * MIB):
            return None
        return area, begin, end

    def grown_bytes(self, area: Area, begin: int, end: int) -> int:
        page_bytes = self.page(area.small) or 1
        if end % page_bytes or end // page_bytes in area.pages:
            return end - begin
        later = [page for page in area.pages if page * page_bytes > end]
        return (min(later) * page_bytes if later else ENDLESS) - begin

    def grow(self, small: bool, size: int) -> tuple[Area, int, int] | None:
        if self.collects and not self.options.expandable_segments:
            self.collect_garbage()
        found = self.take(small, size)
        if found is None and self.release_oversize(small, size):
            found = self.take(small, size)
        if found is None:
            self.release_cached()
            self.retries += 1
            found = self.take(small, size)
        return found

    def take(self, small: bool, size: int) -> tuple[Area, int, int] | None:
        if small:
            segment_bytes = 2 * MIB
        elif size < 10 * MIB:
            segment_bytes = 20 * MIB
        else:
            segment_bytes = (size + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
        if self.options.expandable_segments:
            if self.collects and self.reserved + segment_bytes > self.capacity:
                return None
            return self.take_pages(small, size)
        if self.reserved + segment_bytes > self.capacity:
            return None
        self.num_bases += 1
        area = Area(small, self.num_bases << 40, segment_bytes)
        self.areas.append(area)
        return area, 0, segment_bytes

    def take_pages(self, small: bool, size: int) -> tuple[Area, int, int] | None:
        page_bytes = self.page(small) or 1
        area = next((area for area in self.areas if area.small == small), None)
        if area is None:
            area = Area(small, 0)
            self.areas.append(area)
        used_ends = [start + used for start, used in area.used.items()]
        unmapped = (page for page in range(len(area.pages) + 10**6) if page not in area.pages)
        for page in unmapped:
            # The room around an unmapped page reaches down to the free range before it, and up to the next used one.
            if page - 1 >= 0 and page - 1 not in area.pages:
                continue
            begin = page * page_bytes
            begin = next((start for start, end in area.gaps(page_bytes) if end == begin), begin)
            assert all(end <= begin or end > page * page_bytes for end in used_ends)
            limit = min((start for start in area.used if start >= begin), default=ENDLESS)
            if limit - begin >= size:
                break
        # Every unmapped run below the end of the request is mapped in turn; the device may be full in between.
        position = begin
        while position < begin + size:
            if position // page_bytes in area.pages:
                position = (position // page_bytes + 1) * page_bytes
                continue
            run = 1
            while position + run * page_bytes < begin + size and position // page_bytes + run not in area.pages:
                run += 1
            if self.reserved + run * page_bytes > self.capacity:
                return None
            area.pages |= set(range(position // page_bytes, position // page_bytes + run))
            position += run * page_bytes
        end = next(end for start, end in area.gaps(page_bytes) if start == begin)
        return area, begin, end

    def release_cached(self) -> None:
        for area in list(self.areas):
            page_bytes = self.page(area.small)
            if page_bytes is None:
                if not area.used:
                    self.areas.remove(area)
                continue
            area.pages = {
                page
                for page in area.pages
                if any(
                    start < (page + 1) * page_bytes and start + size > page * page_bytes
                    for start, size in area.used.items()
                )
            }
            if not area.pages:
                self.areas.remove(area)

    def release_oversize(self, small: bool, size: int) -> bool:
        if self.max_split == ENDLESS or self.options.expandable_segments:
            return False
        wanted = max(size, self.max_split)
        free = [
            area for area in self.areas if area.small == small and not area.used and area.num_bytes >= self.max_split
        ]
        enough = sorted((area for area in free if area.num_bytes >= wanted), key=lambda a: (a.num_bytes, a.base))
        if enough:
            self.areas.remove(enough[0])
            return True
        released = 0
        for area in sorted(free, key=lambda a: (-a.num_bytes, -a.base)):
            if released < wanted:
                self.areas.remove(area)
                released += area.num_bytes
        return released >= wanted

    def collect_garbage(self) -> None:
        threshold = int(self.options.garbage_collection_threshold * self.capacity)
        while self.reserved > threshold:
            ages = [(self.searches[False] - a.last_free, a) for a in self.areas if not a.small and not a.used]
            if not ages:
                return
            average = sum(age for age, _ in ages) / len(ages)
            for age, area in ages:
                if age >= average:
                    self.areas.remove(area)


def slow_replay(timeline: Timeline, options: AllocatorOptions, capacity_bytes: int | None) -> Replay:
    """The answer of `replay`, from the slow model."""
    allocator = SlowAllocator(options, capacity_bytes)
    held: dict[int, tuple[Area, int]] = {}
    allocated, reserved = [], []
    requested, requested_peak = 0, 0
    out_of_memory = None
    for tick, (index, is_allocation) in enumerate(timeline.events()):
        request = timeline.blocks[index].size_bytes
        if out_of_memory is None and request:
            if is_allocation:
                handle = allocator.malloc(request)
                if handle is None:
                    out_of_memory = OutOfMemory(tick, request, allocator.allocated, allocator.reserved)
                else:
                    held[index] = handle
                    requested += request
            else:
                allocator.free(held.pop(index))
                requested -= request
        requested_peak = max(requested, requested_peak)
        allocated.append(allocator.allocated)
        reserved.append(allocator.reserved)
    peaks = max(allocated, default=0), max(reserved, default=0), requested_peak
    return Replay(tuple(allocated), tuple(reserved), *peaks, len(allocator.areas), allocator.retries, out_of_memory)


BOUNDARIES = [512, MIB, 2 * MIB, 10 * MIB, 12 * MIB, 18 * MIB, 20 * MIB, 32 * MIB, 40 * MIB, 52 * MIB]
SIZES = st.one_of(
    st.just(0),
    st.integers(1, 4096),
    st.builds(lambda size, offset: max(0, size + offset), st.sampled_from(BOUNDARIES), st.integers(-513, 513)),
    st.integers(1, 2 * MIB),
    st.integers(1, 70 * MIB),
)


@st.composite
def timelines(draw: st.DrawFn, *, freed: bool = False) -> Timeline:
    """Blocks that are freed in random order, all of them where `freed` is true."""
    steps = draw(st.lists(st.one_of(SIZES, st.integers(-40, -1)), max_size=60))
    sizes: list[tuple[int, int]] = []
    ends: dict[int, int] = {}
    live: list[int] = []
    tick = 0
    for step in steps + [-1] * (len(steps) if freed else 0):
        if step >= 0:
            live.append(len(sizes))
            sizes.append((step, tick))
        elif live:
            ends[live.pop(step % len(live))] = tick
        else:
            continue
        tick += 1
    blocks = (
        Block(size, start, ends.get(index), Category.TEMPORARY, Phase.FORWARD)
        for index, (size, start) in enumerate(sizes)
    )
    return Timeline(tuple(blocks), tick)


OPTIONS = st.builds(
    AllocatorOptions,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([None, 20 * MIB, 21 * MIB, 32 * MIB]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.2, 0.6, 0.9]),
    roundup_power2_divisions=st.sampled_from([0, 1, 2, 8]),
)
CAPACITIES = st.one_of(st.none(), st.integers(0, 400 * MIB), st.integers(1, 20).map(lambda pages: pages * 20 * MIB))


@given(timelines(), OPTIONS, CAPACITIES)
def test_the_slow_model_agrees(timeline: Timeline, options: AllocatorOptions, capacity_bytes: int | None) -> None:
    assert replay(timeline, options, capacity_bytes) == slow_replay(timeline, options, capacity_bytes)


@given(timelines(), OPTIONS, CAPACITIES)
def test_reserved_covers_allocated_covers_requested(
    timeline: Timeline, options: AllocatorOptions, capacity_bytes: int | None
) -> None:
    result = replay(timeline, options, capacity_bytes)

    end = result.out_of_memory.tick if result.out_of_memory else timeline.num_ticks
    assert len(result.allocated) == len(result.reserved) == timeline.num_ticks
    assert all(r >= a for a, r in zip(result.allocated, result.reserved, strict=True))
    assert all(a >= live for a, live in zip(result.allocated[:end], timeline.curve(), strict=False))
    assert all(size % (2 * MIB) == 0 for size in result.reserved)
    assert all(size % 512 == 0 for size in result.allocated)
    assert result.allocated_peak_bytes >= result.requested_peak_bytes
    assert 0 <= result.fragmentation <= 1
    if capacity_bytes is not None:
        assert result.reserved_peak_bytes <= capacity_bytes


@given(timelines(freed=True), OPTIONS)
def test_nothing_is_allocated_once_all_is_freed(timeline: Timeline, options: AllocatorOptions) -> None:
    result = replay(timeline, options)

    assert result.allocated[-1:] in ((), (0,))
    assert result.out_of_memory is None
    assert result.num_retries == 0


@given(timelines(), OPTIONS, CAPACITIES)
def test_a_replay_is_deterministic(timeline: Timeline, options: AllocatorOptions, capacity_bytes: int | None) -> None:
    assert replay(timeline, options, capacity_bytes) == replay(timeline, options, capacity_bytes)


@given(timelines(), st.booleans(), st.sampled_from([None, 20 * MIB, 32 * MIB]), st.integers(0, 5 * MIB))
def test_a_capacity_of_the_peak_changes_nothing(
    timeline: Timeline, expandable: bool, max_split_size_bytes: int | None, spare_bytes: int
) -> None:
    # Without garbage collection, which works before the device is full.
    options = AllocatorOptions(expandable_segments=expandable, max_split_size_bytes=max_split_size_bytes)
    unbounded = replay(timeline, options)

    bounded = replay(timeline, options, unbounded.reserved_peak_bytes + spare_bytes)

    assert bounded == unbounded
    assert bounded.num_retries == 0
