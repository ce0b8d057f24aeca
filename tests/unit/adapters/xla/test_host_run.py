from memfit.adapters.xla.host_kernels import Kernel, Way
from memfit.adapters.xla.host_run import NUM_RUNS, several_runs, simulate
from memfit.adapters.xla.host_thunks import Thunk
from memfit.adapters.xla.placement import Placement, Slice

NOTHING = Placement({}, {})
MS = 1e-3


def program(*kernels: Kernel, waits: dict[int, set[int]] | None = None, writes: dict[int, Slice] | None = None):
    """Thunks of these kernels; by default none waits for any."""
    made = [
        Thunk(
            kernel,
            (number, number),
            set((waits or {}).get(number, ())),
            writes=(writes[number],) if writes and number in writes else (),
        )
        for number, kernel in enumerate(kernels)
    ]
    for number, thunk in enumerate(made):
        for other in sorted(thunk.waits_for):
            made[other].then.append(number)
    return made


def peak(thunks, placement=NOTHING, num_threads=2, seed=0):
    return simulate(thunks, placement, num_threads, seed).peak_bytes


def test_what_waits_comes_after():
    two = [Kernel(seconds=MS, fixed_bytes=100), Kernel(seconds=MS, fixed_bytes=30)]

    assert peak(program(*two, waits={1: {0}})) == 100


def test_a_product_leaves_the_thread_to_others():
    # GIVEN two products that don't wait for each other
    product = Kernel(Way.PRODUCT, 10 * MS, 8, fixed_bytes=100)

    # THEN both are there at once, and one after the other where one waits
    assert peak(program(product, product)) == 200
    assert peak(program(product, product, waits={1: {0}})) == 100


def test_a_library_keeps_its_thread_and_lets_others_help():
    library = Kernel(Way.LIBRARY, 10 * MS, 2, fixed_bytes=7, own_bytes=100)

    # THEN each of two threads has a copy of its own, and one thread has one after the other
    assert peak(program(library)) == 207
    assert peak(program(library), num_threads=1) == 107
    assert peak(program(library, library, waits={1: {0}})) == 207


def test_a_library_has_one_copy_while_the_pool_is_busy():
    busy = Kernel(Way.PRODUCT, 200 * MS, 9)
    library = Kernel(Way.LIBRARY, 10 * MS, 2, own_bytes=100)

    assert peak(program(busy, library)) == 100


def test_a_library_that_may_wait_is_left_to_another_thread():
    # GIVEN a library's kernel of two parts, ready together with a long one that takes the thread that comes to both
    library = Kernel(Way.LIBRARY, 10 * MS, 2, own_bytes=100)
    long = Kernel(seconds=100 * MS, fixed_bytes=1000)

    # THEN they run at once; one of a single part runs where it is, one after the other
    assert peak(program(library, long)) == 1200
    assert peak(program(Kernel(Way.LIBRARY, 10 * MS, 1, own_bytes=100), long)) == 1000


def test_a_matrix_stays_while_what_waited_for_it_runs():
    # GIVEN a transposed convolution, and an instruction that waits for it
    transposed = Kernel(Way.PRODUCT, 10 * MS, 8, matrix_bytes=1000)
    after = Kernel(seconds=MS, fixed_bytes=50)

    # THEN the matrix is still there as that one runs; what runs before it is gone
    assert peak(program(transposed, after, waits={1: {0}})) == 1050
    assert peak(program(after, transposed, waits={1: {0}})) == 1000


def test_all_groups_are_begun_before_any_is_finished():
    # GIVEN ten groups, each of four tasks that pack a quarter of 400 bytes, which a thread of the pool comes to
    groups = Kernel(Way.PRODUCT, MS, 4, task_share=0.25, tasks_bytes=400, num_groups=10)

    found = peak(program(Kernel(Way.PRODUCT, MS, 8), groups, waits={1: {0}}))

    # THEN all have a quarter at least, and hardly any has more
    assert 10 * 100 <= found <= 10 * 100 + 2 * 300


def test_tasks_take_no_more_than_there_is():
    product = Kernel(Way.PRODUCT, MS, 2, task_share=0.6, tasks_bytes=1000)

    assert peak(program(product)) == 1000


def test_pages_are_memory_when_they_are_first_written_to():
    # GIVEN a range of four pages and a bit, of which half is written to
    placement = Placement({}, {0: 4 * 4096 + 100})
    quiet = Kernel(seconds=MS)
    taking = Kernel(seconds=MS, fixed_bytes=50_000)

    # THEN only that counts while another takes memory, and the rest when it comes
    writes = {0: Slice(0, 0, 2 * 4096), 2: Slice(0, 4096, 3 * 4096 + 100)}
    assert peak(program(quiet, taking, waits={1: {0}}, writes=writes), placement) == 2 * 4096 + 50_000
    ordered = program(quiet, taking, quiet, waits={1: {0}, 2: {1}}, writes=writes)
    assert peak(ordered, placement) == 2 * 4096 + 50_000
    late = program(quiet, quiet, quiet, taking, waits={1: {0}, 2: {1}, 3: {2}}, writes=writes)
    assert peak(late, placement) == 4 * 4096 + 100 + 50_000


def test_parts_that_threads_share_write_all_there_is():
    # GIVEN a kernel whose parts are short, or so long that they are written piece by piece
    placement = Placement({}, {0: 10 * 4096})
    for seconds in (MS / 10, 10 * MS):
        thunks = program(Kernel(Way.SHARED, seconds, 3), writes={0: Slice(0, 0, 10 * 4096)})

        # THEN everything is memory in the end
        assert peak(thunks, placement) == 10 * 4096


def test_a_part_is_memory_as_it_is_written():
    # GIVEN a long kernel in one part, and another that takes memory at its beginning and ends soon
    placement = Placement({}, {0: 100 * 4096})
    taking = Kernel(Way.PRODUCT, MS, 2, fixed_bytes=100 * 4096)
    long = Kernel(Way.SHARED, 400 * MS, 2)

    found = peak(program(taking, long, writes={1: Slice(0, 0, 100 * 4096)}), placement)

    # THEN they never meet in full
    assert 100 * 4096 < found < 200 * 4096


def test_parts_that_threads_share_end_together():
    shared = Kernel(Way.SHARED, 10 * MS, 2)
    after = Kernel(seconds=MS, fixed_bytes=10)

    run = simulate(program(shared, after, waits={1: {0}}), NOTHING, 2)

    assert run.scratch == ((1, 1, 10),)


def test_long_queues_are_shared_with_the_pool():
    # GIVEN twenty instructions that are ready at once, in which a thread stays
    inline = Kernel(seconds=MS, fixed_bytes=10)

    # THEN several threads run them at once
    assert peak(program(*[inline] * 20), num_threads=4) > 20
    assert peak(program(*[inline] * 5), num_threads=4) == 10


def test_scratch_is_told_at_its_own_instruction_whatever_met_it():
    product = Kernel(Way.PRODUCT, 10 * MS, 8, fixed_bytes=100)
    library = Kernel(Way.LIBRARY, MS, 2, fixed_bytes=7, own_bytes=10)

    run = simulate(program(product, Kernel(seconds=MS / 10), library), NOTHING, 2)

    assert [times for *times, _ in run.scratch] == [[0, 0], [2, 2]]
    # One copy, or two where a thread of the pool was free.
    assert run.scratch[0][2] == 100 and run.scratch[1][2] in (17, 27)


def test_runs_with_a_seed_are_the_same_again():
    groups = Kernel(Way.PRODUCT, MS, 4, task_share=0.25, tasks_bytes=400, num_groups=10)
    library = Kernel(Way.LIBRARY, 10 * MS, 3, own_bytes=700)
    thunks = program(groups, library, groups, library, waits={2: {0}, 3: {1}})

    assert [simulate(thunks, NOTHING, 2, seed) for seed in range(3)] == [
        simulate(thunks, NOTHING, 2, seed) for seed in range(3)
    ]


def test_several_runs_go_from_the_least_to_the_greatest():
    groups = Kernel(Way.PRODUCT, MS, 4, task_share=0.25, tasks_bytes=400, num_groups=10)
    library = Kernel(Way.LIBRARY, 10 * MS, 3, own_bytes=700)
    thunks = program(groups, library, groups, library, waits={2: {0}, 3: {1}})

    peaks = [run.peak_bytes for run in several_runs(thunks, NOTHING, 2)]

    assert peaks == sorted(peak(thunks, seed=seed) for seed in range(NUM_RUNS))


def test_many_groups_are_told_by_some():
    # GIVEN a thousand groups, begun before any is finished
    groups = Kernel(Way.PRODUCT, MS / 100, 4, task_share=0.25, tasks_bytes=400, num_groups=1000)

    found = peak(program(Kernel(Way.PRODUCT, MS, 8), groups, waits={1: {0}}))

    # THEN all count
    assert 1000 * 100 <= found <= 1.1 * 1000 * 100


def test_nothing_to_run_takes_nothing():
    assert peak([]) == 0
