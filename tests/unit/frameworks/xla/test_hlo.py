"""The reader of XLA's program text."""

import pytest

from memfit.core.errors import StepFailed
from memfit.frameworks.xla.hlo import parse, shape_of
from tests.unit.frameworks.xla.programs import LOOP, STEP, entry


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[]", 4),
        ("f32[2,3]{1,0}", 24),
        ("bf16[8]{0}", 16),
        ("pred[3]", 3),
        ("c64[2]", 16),
        ("f8e4m3fn[5]", 5),
        ("s4[6]{0}", 6),
        ("s4[6]{0:E(4)}", 3),
        ("f32[<=8,2]", 64),
        ("token[]", 0),
        ("(f32[2], (s32[], pred[4]))", 16),
    ],
)
def test_sizes_of_shapes(text, size):
    assert shape_of(text).size_bytes == size


def test_instructions_carry_operands_calls_and_places():
    module = parse(STEP)

    fusion = next(i for i in module.entry.instructions if i.opcode == "fusion")
    gradient = next(i for i in module.entry.instructions if i.name == "gradient")

    assert fusion.operands == ("w", "gradient")
    assert fusion.called == {"calls": "fused"}
    assert module.entry.root.name == "tuple"
    assert module.aliases == (((0,), 0, ()),)
    assert gradient.source == (("/code/train.py", 7), ("/code/train.py", 12))
    assert gradient.op_name == "jit(step)/transpose(jvp(layer1))/dot_general"


def test_loops_name_their_computations():
    loop = next(i for i in parse(LOOP).entry.instructions if i.opcode == "while")

    assert loop.called == {"condition": "condition", "body": "body"}


def test_operands_may_come_with_shapes_and_without_signs():
    text = entry("a = f32[2]{0} parameter(0)", "ROOT b = f32[2]{0} add(f32[2]{0} a, f32[2]{0} a)")

    assert parse(text).entry.root.operands == ("a", "a")


def test_older_metadata_names_the_line_itself():
    line = '%a = f32[2]{0} parameter(0), metadata={op_name="x" source_file="m.py" source_line=3}'

    assert parse(entry(line)).entry.root.source == (("m.py", 3),)


def test_conditionals_list_their_branches():
    line = "%c = f32[] conditional(%p, %a, %b), branch_computations={%yes, %no}"

    assert parse(entry("%p = s32[] parameter(0)", line)).entry.root.called == {"branch0": "yes", "branch1": "no"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with ''"),
        ("module @jit_step {", "not with 'HloModule'"),
        ("HloModule a, entry_computation_layout={}", "no schedule yet"),
        ("HloModule a, is_scheduled=true", "no entry computation"),
        (entry("%a = strange parameter(0)"), "can't read the shape"),
    ],
)
def test_what_is_no_program_is_refused(text, message):
    with pytest.raises(StepFailed, match=message):
        parse(text)
