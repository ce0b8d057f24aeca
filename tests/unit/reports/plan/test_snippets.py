"""The pieces by themselves; what they do is tested where they are put together, in test_plan_code.py."""

import ast
import textwrap

import pytest

from memfit.core.settings import Settings
from memfit.reports.plan import snippets as plan_snippets

FUNCTIONS = {
    name: value.replace("COUNTED", "1").replace("NUM_CHUNKS", "2")
    for name, value in vars(plan_snippets).items()
    if name.isupper() and isinstance(value, str) and not name.startswith("_")
}
LINES = {
    "lora": plan_snippets.lora(8, quantized=False),
    "qlora": plan_snippets.lora(8, quantized=True),
    "shard": plan_snippets.shard(Settings(num_devices=4), "cuda"),
    "eight bit": plan_snippets.EIGHT_BIT,
    "cache": plan_snippets.WITHOUT_CACHE,
    "counters": plan_snippets.FUSED_COUNTERS,
}


@pytest.mark.parametrize("text", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_are_whole(text):
    tree = ast.parse(text)

    assert tree.body
    assert all(isinstance(node, ast.FunctionDef) for node in tree.body)
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
def test_lines_stand_inside_of_a_function(lines):
    assert ast.parse(textwrap.dedent("\n".join(lines))).body
    assert all(line.startswith("    ") or not line for line in lines)
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("name", ["PARTS", "PARTS_BY_SAMPLES", "PARTS_BY_COUNT"])
def test_batches_are_split_by_size_or_number(name, by_size):
    text = plan_snippets.parts(FUNCTIONS[name], by_size)

    assert max(map(len, text.splitlines())) <= 120
    assert not {"NUMBER", "LIMIT", "NUM_PARTS", "SHARES"} & set(ast.unparse(ast.parse(text)).replace("(", " ").split())
    assert ("def parts(batch, most):" in text) is by_size


def test_a_quantized_base_says_how_it_is_loaded():
    assert any("load_in_4bit" in line for line in LINES["qlora"])
    assert not any("load_in_4bit" in line for line in LINES["lora"])


def test_shards_wait_in_host_memory_where_wanted():
    lines = plan_snippets.shard(Settings(num_devices=2, shard_offload=True), "cuda")

    assert sum("offload_policy=CPUOffloadPolicy()" in line for line in lines) == 2
    assert not any("CPUOffloadPolicy" in line for line in LINES["shard"])
