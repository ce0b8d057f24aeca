"""Blocks of a compiled program."""

import os

import pytest

from memfit.core.timeline import Category, Phase, Timeline
from memfit.frameworks.xla.hlo import parse
from memfit.frameworks.xla.liveness import lay_out, lives_of
from memfit.frameworks.xla.program import Origins, XlaProgram, num_processors, phase_of, scopes_of, turn_of
from memfit.frameworks.xla.scratch import Scratch
from tests.unit.frameworks.xla.programs import LOOP, STEP, entry


def describe(number):
    return (Category.PARAMETER, "layer1") if number == 0 else (Category.BATCH, "")


def made(text, describe_result=None, scratch=(), phase_of=None) -> Timeline:
    """The timeline of a program."""
    return XlaProgram(text).timeline(describe, describe_result, scratch, phase_of)


def test_blocks_say_what_they_are_for():
    timeline = made(STEP)
    found = {(block.op, block.category, block.phase, block.module): block for block in timeline.blocks}

    assert ("parameter", Category.PARAMETER, Phase.SETUP, "layer1") in found
    assert ("input batch", Category.BATCH, Phase.SETUP, "") in found
    assert ("tanh", Category.ACTIVATION, Phase.FORWARD, "layer1") in found
    assert ("dot_general (dot)", Category.GRADIENT, Phase.BACKWARD, "layer1") in found
    assert found["tanh", Category.ACTIVATION, Phase.FORWARD, "layer1"].source == "train.py:7"


def test_where_only_the_backward_pass_is_named_the_rest_is_told_by_its_place():
    """TensorFlow's names."""
    text = STEP.replace("jit(step)/transpose(jvp(layer1))", "gradient_tape/layer1")
    for name, other in (("jit(step)/jvp(layer1)", "layer1"), ("jit(step)/jvp()", "loss"), ("jit(step)/", "sgd/")):
        text = text.replace(name, other)
    timeline = made(text)
    found = {(block.op, block.category, block.phase) for block in timeline.blocks}

    assert ("tanh", Category.ACTIVATION, Phase.FORWARD) in found
    assert ("dot_general (dot)", Category.GRADIENT, Phase.BACKWARD) in found
    assert [mark.phase for mark in timeline.marks] == [Phase.SETUP, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]


def test_what_lives_never_exceeds_what_is_laid_out():
    for text in (STEP, LOOP):
        layout = lay_out(lives_of(parse(text)))

        assert made(text).peak()[1] <= layout.total_bytes + layout.constant_bytes


def test_ticks_are_one_per_event():
    timeline = made(STEP)
    ticks = [block.start for block in timeline.blocks] + [b.end for b in timeline.blocks if b.end is not None]

    assert sorted(ticks) == list(range(timeline.num_ticks))
    assert list(timeline.blocks) == sorted(timeline.blocks, key=lambda block: block.start)


def test_marks_follow_the_passes():
    timeline = made(STEP)

    assert [mark.phase for mark in timeline.marks] == [Phase.SETUP, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert [mark.tick for mark in timeline.marks] == sorted(mark.tick for mark in timeline.marks)


def test_results_are_described_by_the_caller():
    text = STEP.replace(", input_output_alias={ {0}: (0, {}, may-alias) }", "")

    timeline = made(text, lambda number: (Category.PARAMETER, f"result {number}"))

    assert "result 0" in {block.module for block in timeline.blocks}


def test_a_parameters_shape_from_the_backward_pass_is_a_gradient():
    text = STEP.replace(", input_output_alias={ {0}: (0, {}, may-alias) }", "").replace(
        "tuple(%fusion", "tuple(%gradient"
    )

    timeline = made(text, lambda number: (Category.PARAMETER, ""))

    last = next(block for block in timeline.blocks if block.op == "dot_general (dot)" and block.end is None)
    assert last.category is Category.GRADIENT


def test_nameless_instructions_are_named_after_their_readers():
    named = 'metadata={op_name="jit(f)/jvp(layer2)/exp"}'
    text = entry(
        "%a = f32[8]{0} parameter(0)",
        "%r = f32[8]{0} reverse(%a), dimensions={0}",
        f"ROOT %e = f32[8]{{0}} exponential(%r), {named}",
    )

    timeline = made(text)

    assert next(block for block in timeline.blocks if block.op == "reverse").module == "layer2"


def test_copies_of_arguments_count_as_what_they_copy():
    text = entry(
        "%a = f32[8]{0} parameter(0)",
        "%c = f32[8]{0} copy(%a)",
        "ROOT %e = f32[8]{0} reverse(%c), dimensions={0}",
    )

    timeline = made(text)

    assert next(block for block in timeline.blocks if block.op == "copy").category is Category.PARAMETER


def test_kernels_on_the_host_take_memory_of_their_own():
    plain, timeline = made(STEP), made(STEP, scratch=[Scratch(3, 4, 70, 0, 70), Scratch(0, 1, 500, 0, 500)])

    workspaces = [block for block in timeline.blocks if block.category is Category.WORKSPACE]
    assert [block.size_bytes for block in workspaces] == [500, 70]
    assert [block.op for block in workspaces] == ["dot_general (dot)", "mul (cosine)"]
    assert not [block for block in plain.blocks if block.category is Category.WORKSPACE]


def test_updates_between_parts_of_the_backward_pass_are_no_forward_pass():
    """XLA updates a weight as soon as it has its gradient: in bytes, most of a step may look like its beginning."""
    forward, backward, update = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER

    assert turn_of([(forward, 8), (backward, 1), (forward, 8), (backward, 4), (update, 90), (backward, 1)]) == 3
    assert turn_of([(forward, 8), (None, 90), (backward, 4), (forward, 2)]) == 1


def test_a_framework_may_tell_phases_by_names_of_its_own():
    text = STEP.replace("transpose(jvp(layer1))", "back").replace("jvp(", "plain(")

    def phase_of(name):
        if "back/" in name:
            return Phase.BACKWARD
        return Phase.OPTIMIZER if name.endswith("sub") else Phase.FORWARD if name else None

    found = {(block.op, block.category) for block in made(text, phase_of=phase_of).blocks}

    assert ("tanh", Category.ACTIVATION) in found
    assert ("dot_general (dot)", Category.GRADIENT) in found
    assert ("tanh", Category.ACTIVATION) not in {(block.op, block.category) for block in made(text).blocks}


PRODUCTS = STEP.replace("64,16", "4096,1024").replace("16,16", "1024,1024")


def test_scratch_is_part_of_the_timeline():
    program = XlaProgram(PRODUCTS)
    scratch = program.scratch(num_threads=2)

    timeline = program.timeline(describe, scratch=scratch)

    sizes = sorted(block.size_bytes for block in timeline.blocks if block.category is Category.WORKSPACE)
    assert len(sizes) == 2
    assert sizes == sorted(one.own_bytes for one in scratch)


def test_threads_are_as_many_as_there_are_processors_for_the_process():
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system has no affinities")
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert num_processors() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert num_processors() == len(allowed)


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("jit(step)/jvp(layer1)/dot_general", Phase.FORWARD),
        ("jit(step)/transpose(jvp(layer1))/dot_general", Phase.BACKWARD),
        ("gradient_tape/model/dense/MatMul", Phase.BACKWARD),
        ("jit(step)/sub", None),
    ],
)
def test_names_tell_the_phase(name, phase):
    assert phase_of(name) is phase


@pytest.mark.parametrize(
    ("name", "path", "primitive"),
    [
        ("jit(step)/transpose(jvp(block1))/dense/jit(relu)/max", "block1.dense", "max"),
        ("jit(step)/jvp(MLP)/Dense_0/dot_general", "MLP.Dense_0", "dot_general"),
        ("jit(step)/jvp()/while/body/closed_call/add", "", "add"),
        ("jit(step)/vmap(jit(sort))/sort", "", "sort"),
        ("jit(f)/bqhd,bkhd->bhqk/dot_general", "", "dot_general"),
        ("", "", ""),
    ],
)
def test_names_tell_the_module(name, path, primitive):
    assert scopes_of(name) == (path, primitive)


def test_fusions_are_named_after_what_is_inside(monkeypatch):
    text = STEP.replace('calls=%fused, metadata={op_name="jit(step)/sub" stack_frame_id=1}', "calls=%fused")
    module = parse(text)
    fusion = next(i for i in module.entry.instructions if i.opcode == "fusion")

    origin = Origins(module).of(fusion)

    assert origin.op == "sub (fusion)"
    assert origin.source == "train.py:12"


def test_constants_which_programs_share_name_no_fusion():
    text = STEP.replace('calls=%fused, metadata={op_name="jit(step)/sub" stack_frame_id=1}', "calls=%fused")
    lines = []
    for line in text.splitlines():
        if " subtract(" in line:
            line = line.partition(", metadata=")[0]
            lines.append('  %shared = f32[] constant(0), metadata={op_name="jit(step)/elsewhere/mean"}')
        lines.append(line)
    module = parse("\n".join(lines))
    fusion = next(i for i in module.entry.instructions if i.opcode == "fusion")

    assert "elsewhere" not in Origins(module).of(fusion).module
