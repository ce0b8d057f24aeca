"""A float64 file inspected, converted to float32 and streamed: `python examples/stream/convert.py [FOLDER]`.

The files are made in FOLDER, and stay there; without one, in a temporary folder.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np


def make_file(path):
    """128 MiB of measurements as most programs write them, in float64."""
    generator = np.random.default_rng(0)
    np.save(path, generator.normal(20, 5, (16_384, 1_024)))


def memfit(words, folder):
    print(f"$ memfit {words}", flush=True)
    subprocess.run([sys.executable, "-m", "memfit", *words.split()], cwd=folder, check=True)


def main():
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        make_file(folder / "train.npy")
        memfit("data inspect train.npy --memory 32MiB --batch-size 64", folder)
        memfit("data convert train.npy small.npy --dtype float32 --overwrite", folder)
        before, after = (os.path.getsize(folder / name) for name in ("train.npy", "small.npy"))
        print(f"{before:,} bytes before, {after:,} after: {1 - after / before:.0%} saved")
        memfit("data bench small.npy --memory 32MiB --batch-size 64 --seconds 2", folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
