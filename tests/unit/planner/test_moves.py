import pytest

from memfit.catalogue import find_device
from memfit.core.errors import BadInput
from memfit.core.settings import Keeps, OptimizerKernels, OptimizerState, Settings
from memfit.planner.moves import DEFAULT_ALLOW, KEEPS, allowed_moves, autocast_of, label, named, used_moves


def test_the_default_lets_nothing_in_that_changes_training():
    allowed = allowed_moves(DEFAULT_ALLOW)
    assert allowed == {name for name, keeps in KEEPS.items() if keeps is not Keeps.CHANGES} - {"compile"}


def test_compiling_is_allowed_by_its_name_alone():
    assert "compile" not in allowed_moves(["exact", "rounding", "changes"])
    assert allowed_moves(["exact", "compile"]) == allowed_moves(["exact"]) | {"compile"}
    assert allowed_moves(["compile", "-rounding"]) == {"compile"}


def test_names_add_and_minus_signs_remove():
    assert allowed_moves(["lora"]) == {"lora"}
    assert "micro-batch" not in allowed_moves(["exact", "rounding", "-micro-batch"])
    assert allowed_moves("exact,-exact") == frozenset()
    assert "qlora" in allowed_moves(["changes training"])
    assert allowed_moves(["-checkpoint"]) == allowed_moves(DEFAULT_ALLOW) - {"checkpoint"}
    assert allowed_moves(["changes", "approximate", "-changes", "-approximate"]) == frozenset()
    assert "approximate" in allowed_moves(["approximate"])


def test_what_is_no_move_is_refused_with_what_is():
    with pytest.raises(BadInput, match="'magic' is not something that can be allowed") as caught:
        allowed_moves(["exact", "magic"])
    assert "micro-batch" in str(caught.value)
    for word, meant in (("exat", "exact"), ("-checkpiont", "checkpoint"), ("8bit-optimizer", "8-bit-optimizer")):
        with pytest.raises(BadInput) as caught:
            allowed_moves([word])
        assert str(caught.value) == f"{word!r} is not something that can be allowed. Did you mean {meant!r}?"


EVERYTHING = Settings(
    micro_batches=4,
    precision="amp-fp16",
    checkpoint=("h.0", "h.1"),
    offload=("h.2",),
    cross_entropy_chunks=8,
    kernels=OptimizerKernels.FUSED,
    state=OptimizerState.HOST,
    step_in_backward=True,
    expandable_segments=True,
    channels_last=True,
    num_devices=2,
    lora_rank=8,
    freeze=("embedding",),
)


def test_every_setting_is_a_move_that_can_be_taken_back():
    moves = used_moves(EVERYTHING, batch_size=10)
    assert {move.name for move in moves} == {
        "micro-batch", "autocast", "checkpoint", "activation-offload", "chunked-cross-entropy", "fused-optimizer",
        "host-optimizer", "step-in-backward", "expandable-segments", "channels-last", "shard", "lora", "freeze",
    }  # fmt: skip
    for move in moves:
        names = {other.name for other in used_moves(move.without, batch_size=10)}
        assert names == {other.name for other in moves} - {move.name}


def test_plain_settings_use_no_move():
    assert used_moves(Settings(), batch_size=8) == []
    assert label(Settings()) == "as it is"


def test_micro_batches_that_only_approximate_say_so():
    (move,) = used_moves(Settings(micro_batches=4), batch_size=10, approximate="batch norm sees less")
    assert move.keeps is Keeps.CHANGES and move.caveat == "batch norm sees less"
    (move,) = used_moves(Settings(micro_batches=4), batch_size=10)
    assert move.keeps is Keeps.ROUNDING and "of 3" in move.title


def test_quantized_adapters_have_a_name_of_their_own():
    (move,) = used_moves(Settings(lora_rank=8, quantized_base=True), batch_size=8)
    assert move.name == "qlora" and "quantized" in move.title


def test_labels_name_every_move():
    text = label(EVERYTHING)
    for word in ("4 micro-batches", "recompute 2", "offload 1", "amp-fp16", "sharded over 2", "frozen"):
        assert word in text


def test_long_lists_of_modules_are_cut():
    assert named(("a", "b", "c", "d", "e")) == "a, b, c and 2 more"
    assert named(tuple(f"blocks.{n}.mlp" for n in range(12))) == "blocks.0-11.mlp"


def test_compiled_dropout_is_told():
    (move,) = used_moves(Settings(compile=True), dropout=True)
    assert (move.keeps, move.caveat) == (Keeps.ROUNDING, "dropout draws other masks")
    assert not used_moves(Settings(compile=True))[0].caveat


def test_dropout_under_micro_batches_is_told():
    (move,) = used_moves(Settings(micro_batches=2), batch_size=8, dropout=True)
    assert "dropout" in move.caveat
    (move,) = used_moves(Settings(micro_batches=2), batch_size=8)
    assert not move.caveat


@pytest.mark.parametrize(("name", "width"), [("t4", "amp-fp16"), ("a100-40gb", "amp-bf16"), ("24GiB", "amp-bf16")])
def test_autocast_by_device(name, width):
    assert autocast_of(find_device(name)) == width
