"""Liger's kernels in a dry run, without a GPU and without Triton."""

import subprocess
import sys
from pathlib import Path

import pytest

import memfit

SCRIPT = Path(__file__).parent / "scripts" / "liger_llama.py"
VOCABULARY, HIDDEN, ROWS = 32000, 512, 4 * 512

pytest.importorskip("liger_kernel")


def test_the_loss_is_computed_in_chunks(tmp_path):
    command = [sys.executable, "-m", "memfit", "dryrun", "--device", "a100-40gb", "--json", str(SCRIPT)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)

    assert done.returncode == 0, done.stderr[-3000:]
    sizes = {block.size_bytes for block in memfit.DryRun.from_json(done.stdout).estimate.timeline.blocks}
    # Chunks of as many rows as hold no more than the hidden states (fused_linear_cross_entropy.py): 63 chunks, so 33
    # rows each, of which the next power of two.
    assert 64 * VOCABULARY * 2 in sizes
    # The logits of all rows are never there.
    logits = ROWS * VOCABULARY
    assert not sizes & {2 * logits, 4 * logits}
