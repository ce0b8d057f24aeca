"""The executor: counts of users, places taken over, loops, orders."""

import numpy as np
import pytest

from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.frameworks.tensorflow.trace.liveness import Executor
from tests.unit.frameworks.tensorflow.graphs import graph, node

SIZE = 1024


def lived(made, held=None, **options):
    settings = {"num_threads": 1, "on_gpu": False, **options}
    return Executor(made, held or {}, **settings).run()


def peak(run):
    blocks = tuple(Block(b.size, b.start, b.end, Category.TEMPORARY, Phase.FORWARD) for b in run.buffers)
    return Timeline(blocks, run.num_ticks).peak()[1]


def chains(num_chains=6, length=4):
    """Chains that two threads go through in whichever order their operators are done."""
    nodes = [node("start", "Fill", shape=(1,))]
    for chain in range(num_chains):
        before = "start"
        for place in range(length):
            name = f"{chain}.{place}"
            nodes.append(node(name, "Tile", [before], shape=(256 * (1 + (chain * 7 + place * 5) % 11),)))
            before = name
    return graph(*nodes)


def test_operators_that_take_other_times_run_in_other_orders():
    def peaks():
        return [lived(chains(), num_threads=2, seed=seed).peak_bytes for seed in range(12)]

    assert len(set(peaks())) > 1
    assert peaks() == peaks()


def test_a_single_thread_has_one_order():
    runs = [lived(chains(), seed=seed) for seed in range(4)]
    assert len({run.peak_bytes for run in runs}) == 1
    assert runs[0].peak_bytes == peak(runs[0])


def test_a_tensor_goes_with_its_last_consumer():
    run = lived(graph(node("x", "Fill"), node("y", "Tile", ["x"]), node("z", "Tile", ["y"])))
    first, second, third = run.buffers
    assert first.end is not None and first.end < third.start
    assert peak(run) == 2 * SIZE
    assert second.end is not None and third.end is not None


def test_a_kernel_writes_over_what_it_alone_holds():
    assert peak(lived(graph(node("x", "Fill"), node("y", "Relu", ["x"]), node("z", "Neg", ["y"])))) == SIZE


def test_nothing_is_written_over_that_others_need():
    made = graph(node("x", "Fill"), node("y", "Relu", ["x"]), node("z", "AddV2", ["x", "y"]))
    assert peak(lived(made)) == 2 * SIZE


def test_views_take_nothing():
    made = graph(node("x", "Fill"), node("y", "Reshape", ["x"], shape=(16, 16)), node("z", "Relu", ["y"], (16, 16)))
    assert peak(lived(made)) == SIZE


def test_the_batch_is_not_written_over():
    made = graph(node("x", "Placeholder"), node("y", "Relu", ["x"]))
    run = lived(made, {0: (SIZE, "batch x")})
    assert peak(run) == 2 * SIZE
    assert run.buffers[0].end is None


def variable(*rest):
    return graph(node("v", "Placeholder", item_bytes=0, shape=()), *rest)


def test_a_variable_is_read_without_a_copy():
    made = variable(node("r", "ReadVariableOp", ["v"]), node("y", "Sum", ["r"], shape=()))
    assert peak(lived(made, {0: (SIZE, "variable 0")})) == SIZE + 4


def test_rows_of_a_variable_that_change_make_every_read_a_copy():
    made = variable(
        node("r", "ReadVariableOp", ["v"]),
        node("y", "Sum", ["r"], shape=()),
        node("s", "ResourceScatterAdd", ["v", "y"], item_bytes=0, shape=(), num_outputs=0),
    )
    assert peak(lived(made, {0: (SIZE, "variable 0")})) == 2 * SIZE + 4


def test_a_variable_is_changed_in_place():
    made = variable(node("x", "Fill"), node("a", "AssignSubVariableOp", ["v", "x"], num_outputs=0))
    run = lived(made, {0: (SIZE, "variable 0")})
    assert peak(run) == 2 * SIZE
    assert len(run.buffers) == 2


def test_a_variable_that_is_still_read_is_copied():
    made = variable(
        node("r", "ReadVariableOp", ["v"]),
        node("x", "Fill", controls=["r"]),
        node("a", "AssignSubVariableOp", ["v", "x"], num_outputs=0),
        node("y", "Sum", ["r"], shape=(), controls=["a"]),
    )
    run = lived(made, {0: (SIZE, "variable 0")})
    assert peak(run) == 3 * SIZE
    assert [b.variable for b in run.buffers].count("variable 0") == 2


def test_an_assigned_tensor_becomes_the_variable():
    made = variable(node("x", "Fill"), node("a", "AssignVariableOp", ["v", "x"], num_outputs=0))
    run = lived(made, {0: (SIZE, "variable 0")})
    old, new = run.buffers
    assert old.end is not None
    assert new.end is None and new.variable == "variable 0"


@pytest.mark.parametrize(("value", "taken"), [(True, "yes"), (False, "no")])
def test_only_the_branch_taken_runs(value, taken):
    made = graph(
        node("x", "Fill"),
        node("p", "Const", shape=(), item_bytes=1, value=np.array(value)),
        node("s", "Switch", ["x", "p"], num_outputs=2),
        node("no", "Tile", ["s:0"], shape=(512,)),
        node("yes", "Tile", ["s:1"], shape=(768,)),
        node("m", "Merge", ["no", "yes"]),
        node("z", "Tile", ["m"], shape=(128,)),
    )
    sizes = [b.size for b in lived(made).buffers]
    assert (768 * 4 in sizes, 512 * 4 in sizes) == (taken == "yes", taken == "no")
    assert 128 * 4 in sizes


def test_a_branch_that_only_the_run_knows_is_named():
    made = graph(
        node("x", "Fill"),
        node("p", "IsFinite", ["x"], shape=(), item_bytes=1),
        node("s", "Switch", ["x", "p"], num_outputs=2),
        node("yes", "Tile", ["s:1"]),
    )
    assert lived(made).guessed == ("s",)


def loop(num_iterations, limit=0):
    """A loop that pushes a tensor onto a list in each iteration, and sums nothing up."""
    frame = {"frame_name": b"while", "parallel_iterations": limit}
    scalar = {"shape": (), "item_bytes": 4}
    listed = {"shape": (), "item_bytes": 0}
    return graph(
        node("zero", "Const", value=np.array(0), **scalar),
        node("limit", "Const", value=np.array(num_iterations), **scalar),
        node("one", "Const", value=np.array(1), **scalar),
        node("list", "EmptyTensorList", ["one", "one"], **listed),
        node("i0", "Enter", ["zero"], **scalar, **frame),
        node("n", "Enter", ["limit"], is_constant=True, **scalar, **frame),
        node("k", "Enter", ["one"], is_constant=True, **scalar, **frame),
        node("l0", "Enter", ["list"], **listed, **frame),
        node("i", "Merge", ["i0", "i2"], **scalar),
        node("l", "Merge", ["l0", "l2"], **listed),
        node("less", "Less", ["i", "n"], shape=(), item_bytes=1),
        node("go", "LoopCond", ["less"], shape=(), item_bytes=1),
        node("is", "Switch", ["i", "go"], num_outputs=2, **scalar),
        node("ls", "Switch", ["l", "go"], num_outputs=2, **listed),
        node("i1", "AddV2", ["is:1", "k"], **scalar),
        node("x", "Fill", ["is:1"]),
        node("l1", "TensorListPushBack", ["ls:1", "x"], **listed),
        node("i2", "NextIteration", ["i1"], **scalar),
        node("l2", "NextIteration", ["l1"], **listed),
        node("out", "Exit", ["ls:0"], **listed),
        node("all", "TensorListStack", ["out", "one"], shape=(num_iterations, 256)),
    )


@pytest.mark.parametrize("num_iterations", [0, 1, 7])
def test_loops_run_to_their_end_and_lists_hold_what_they_keep(num_iterations):
    run = lived(loop(num_iterations))
    kept = [b for b in run.buffers if b.size == SIZE and b.node >= 0]
    stacked = num_iterations * SIZE
    assert len(kept) == num_iterations + (num_iterations == 1)
    assert 2 * stacked <= peak(run) <= 2 * stacked + 64
    assert all(b.end is not None for b in kept)


def racing(limit):
    """A loop whose counter runs ahead of the work that its iterations do, of which nothing is kept."""
    made = loop(20, limit)
    by_name = {one.name: number for number, one in enumerate(made.nodes)}
    work = node("work", "MatMul", shape=(512, 512))
    work.inputs = [(by_name["x"], 0), (by_name["x"], 0)]
    made.nodes.append(work)
    made.consumers.append([])
    made.control_consumers.append([])
    made.consumers[by_name["x"]] += [(0, len(made.nodes) - 1, 0), (0, len(made.nodes) - 1, 1)]
    return made


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (3, 3)])
def test_only_as_many_iterations_run_at_once_as_the_loop_allows(limit, most):
    blocks = [b for b in lived(racing(limit), num_threads=8).buffers if b.size == 512 * 512 * 4]
    assert len(blocks) == 20
    assert max(sum(b.start <= tick < b.end for b in blocks) for tick in (b.start for b in blocks)) == most


def test_what_all_iterations_share_is_freed_with_the_loop():
    made = loop(3)
    assert all(b.end is not None for b in lived(made).buffers if made.nodes[b.node].op != "Const")


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_every_order_frees_everything(num_threads):
    made = graph(
        node("x", "Fill"),
        *(node(f"a{n}", "Tile", ["x"]) for n in range(6)),
        *(node(f"b{n}", "Tile", [f"a{n}"]) for n in range(6)),
        node("z", "AddN", [f"b{n}" for n in range(6)]),
    )
    run = lived(made, num_threads=num_threads)
    assert all(b.end is not None for b in run.buffers)
    assert sum(b.size for b in run.buffers) == 13 * SIZE


def test_a_gpu_runs_in_the_order_of_readiness():
    made = graph(node("x", "Fill"), node("a", "Tile", ["x"]), node("b", "Tile", ["x"]), node("c", "Tile", ["a"]))
    names = [made.nodes[b.node].name for b in lived(made, on_gpu=True).buffers]
    assert names == ["x", "a", "b", "c"]
    assert [made.nodes[b.node].name for b in lived(made).buffers] == ["x", "b", "a", "c"]


def test_results_outlive_the_step():
    run = lived(graph(node("x", "Fill"), node("y", "Tile", ["x"]), results=["y"]))
    assert run.buffers[0].end is not None
    assert run.buffers[1].end is None
