"""Where instructions come from."""

import pytest

from memfit.core.timeline import Phase
from memfit.frameworks.xla.hlo import parse
from memfit.frameworks.xla.origin import Origins, phase_of, scopes_of
from tests.unit.frameworks.xla.programs import STEP


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
