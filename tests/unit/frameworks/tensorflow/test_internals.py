"""TensorFlow gets a process of its own, which has every private name that is used."""

import subprocess
import sys

import pytest

pytest.importorskip("tensorflow")

SCRIPT = """
import tensorflow as tf
from memfit.frameworks.tensorflow import internals

assert internals.op_definition("MatMul").input_arg and internals.op_definition("NoSuchOp") is None
assert internals.run_kernel("AddV2", 1, [tf.constant(2), tf.constant(3)], ("T", tf.int32.as_datatype_enum))[0] == 5
compiled = tf.function(lambda value: value * 2, jit_compile=True)
assert internals.is_compiled(compiled) and not internals.is_compiled(tf.function(lambda: None))
text = internals.compiled_text(compiled.get_concrete_function(tf.TensorSpec((3,))))
assert text.startswith("HloModule") and "is_scheduled=true" in text
with tf.GradientTape() as tape:
    one = tf.constant(1.0)
    tape.watch(one)
    with internals.stop_recording():
        two = one + one
assert tape.gradient(two, one) is None
graph, order = internals.new_graph("turn")
with graph.as_default(), order:
    tf.constant(1.0)
assert graph.get_operations()
"""


def test_every_private_name_is_there():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
