"""What each move saves, against the public table of a fine-tuning library: Llama 3.2 3B on one A100.

    python -m benchmarks.plan_public_table [--moves N]

The README of torchtune (https://github.com/pytorch/torchtune) lists the peak of `torch.cuda.memory_stats`' active bytes
("Peak Memory Active") as one technique after another is switched on: batch 2 x 4096 tokens, packed, bfloat16. The same
moves are put, one after another, on transformers' model of the same shapes, and each result is traced on the simulated
device. The library's models are its own and most of its rows are compiled; the percentages of its table compare each
row with the one before, and so do ours.
"""

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.reporting import Bar, bullets, publish, table
from memfit.catalogue import find_device
from memfit.core.settings import OptimizerState, Settings
from memfit.core.units import GIB
from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators
from memfit.frameworks.torch.shapes.stand_in import build_without_weights
from memfit.frameworks.torch.trace.trace import Step, trace

DEVICE = "a100-80gb"
LIMIT_POINTS = 10.0
NUM_LAYERS = 28
BLOCKS = tuple(f"model.layers.{index}" for index in range(NUM_LAYERS))


@dataclass(frozen=True, slots=True)
class Move:
    """One row of the table.

    Args:
        name: as the table has it.
        changes: of the settings of the row before.
        public_gib: the library's figure.
        public_change: in percent of its row before; None for the first.
        held: whether the bar covers it.
    """

    name: str
    changes: dict[str, Any]
    public_gib: float
    public_change: float | None
    held: bool = True


MOVES = (
    Move("packed baseline", {}, 60.0, None),
    Move("+ chunked cross entropy", {"cross_entropy_chunks": 8}, 42.9, -15.83),
    Move("+ activation checkpointing", {"checkpoint": BLOCKS}, 24.9, -41.93),
    Move("+ optimizer step in backward", {"step_in_backward": True}, 23.1, -7.29),
    Move("+ activation offload", {"offload": BLOCKS}, 21.8, -5.48),
    Move("+ 8-bit AdamW", {"state": OptimizerState.EIGHT_BIT}, 17.6, -19.63),
    Move(
        "LoRA",
        {"lora_rank": 64, "step_in_backward": False, "state": OptimizerState.KEEP},
        8.5,
        -51.61,
        held=False,
    ),
    Move("QLoRA", {"quantized_base": True}, 4.6, -45.71, held=False),
)


def build() -> torch.nn.Module:
    """Llama 3.2 3B, without weights."""
    define_missing_operators()
    # It imports torchvision, whose operators must be there.
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=NUM_LAYERS,
        hidden_size=3072,
        intermediate_size=8192,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return build_without_weights(lambda: transformers.LlamaForCausalLM(config).to(torch.bfloat16))


def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of transformers' own forward pass."""
    value: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return value


def peaks(moves: tuple[Move, ...]) -> list[int]:
    """Allocated bytes at the peak, row by row."""
    model, tokens, device = build(), torch.zeros(2, 4096, dtype=torch.long), find_device(DEVICE)
    settings = Settings()
    found = []
    for move in moves:
        settings = replace(settings, **move.changes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
        step = Step(model, loss, tokens, optimizer, settings=settings)
        found.append(trace(step, device).timeline.peak()[1])
        print(f"{move.name}: {found[-1] / GIB:.2f} GiB", flush=True)
    return found


def main() -> None:
    """Traces all rows and publishes them."""
    parser = argparse.ArgumentParser(description="the public table of Llama 3.2 3B, move by move")
    parser.add_argument("--moves", type=int, default=len(MOVES), help="only the first rows; nothing is saved then")
    moves = MOVES[: parser.parse_args().moves]
    found = peaks(moves)
    rows, distances = [(MOVES[0].name, "60.0", f"{found[0] / GIB:.1f}", "", "", "")], []
    for before, peak, move in zip(found, found[1:], moves[1:], strict=False):
        assert move.public_change is not None
        change = 100 * (peak / before - 1)
        distance = abs(change - move.public_change)
        if move.held:
            distances.append((distance, change * move.public_change > 0))
        public, ours = f"{move.public_change:+.1f}%", f"{change:+.1f}%"
        rows.append((move.name, f"{move.public_gib:.1f}", f"{peak / GIB:.1f}", public, ours, f"{distance:.1f}"))
    worst = max((distance for distance, _ in distances), default=0.0)
    right = sum(same for _, same in distances)
    bars = [
        Bar(
            "moves that change the peak in the public direction",
            f"{right} of {len(distances)}",
            "all",
            right == len(distances),
        ),
        Bar(
            "largest distance from the public change",
            f"{worst:.1f} points",
            f"<= {LIMIT_POINTS:.0f} points",
            worst <= LIMIT_POINTS,
        ),
    ]
    headers = ("move", "public GiB", "ours GiB", "public change", "our change", "points apart")
    remarks = [
        "Public: torchtune's README, recipe full_finetune_single_device (LoRA and QLoRA: their own recipes), "
        "Llama 3.2 3B, batch 2 x 4096, bf16, A100; peak of active bytes, measured. Ours: peak of allocated bytes, "
        "simulated; nothing was run on a GPU.",
        "Each change is against the row before. The public table has one more row, compilation (51.0 GiB, -14.9%), "
        "between baseline and chunked cross entropy; ours are not compiled.",
        "Ours: transformers' LlamaForCausalLM (28 layers, tied embeddings), scaled_dot_product_attention as CUDA "
        "chooses it, fused AdamW, blocks checkpointed one by one, cross entropy in 8 chunks, which is the library's "
        "default too. The library keeps logits in bfloat16 for the whole batch; ours are computed chunk by chunk, so "
        "that rows from there on hold less, and what follows is a larger part of them.",
        "LoRA and QLoRA (rank 64 as in the library's recipe, there without the key projections) change what is "
        "trained; they are shown, but the bars are about the rows above.",
    ]
    sections = ["## Moves", table(headers, rows), "## What is compared", bullets(remarks)]
    title = "Moves against a public table: Llama 3.2 3B, batch 2 x 4096, one A100"
    publish("plan_public_table", title, bars, sections, save=len(moves) == len(MOVES))


if __name__ == "__main__":
    main()
