"""Training on a file that doesn't fit into memory: `python examples/stream/train.py [LIMIT_MIB]`.

`train.py FOLDER LIMIT_MIB WORKERS NAME [KILL]` trains in this process, on the files in FOLDER, with checkpoints in
FOLDER/NAME, and is killed after step KILL. LIMIT_MIB is what the process may take beyond what it holds when it begins.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import memfit

try:
    import resource
except ImportError:
    # Windows has no such limits.
    resource = None

NUM_CLASSES, NUM_SAMPLES, WIDTH, BATCH_SIZE = 8, 2**18, 256, 1024
KILLED_AFTER, CHECKPOINT_EVERY, PRINTED_EVERY = 220, 64, 32


def make_files(folder):
    """256 MiB of samples, sorted by class, written piece by piece."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(NUM_CLASSES, WIDTH)).astype(np.float32)
    labels = np.arange(NUM_SAMPLES) * NUM_CLASSES // NUM_SAMPLES
    np.save(folder / "y.npy", labels)
    header = {"descr": "<f4", "fortran_order": False, "shape": (NUM_SAMPLES, WIDTH)}
    with open(folder / "x.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        noise = 8 * generator.standard_normal((8192, WIDTH), np.float32)
        for start in range(0, NUM_SAMPLES, len(noise)):
            file.write(centres[labels[start : start + len(noise)]] + np.roll(noise, start // 8192, axis=1))


def loss(model, batch):
    features, labels = batch
    return F.cross_entropy(model(features), labels)


def train(folder, num_workers, name, killed_after):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    stream = memfit.stream((folder / "x.npy", folder / "y.npy"), batch_size=BATCH_SIZE, memory="32MiB")
    options = memfit.GuardOptions(checkpoint_every=CHECKPOINT_EVERY, remember=False)
    guard = memfit.Guard(model, optimizer, plan=None, checkpoint=folder / name, options=options)
    if guard.resumed_from is not None:
        print(f"  resumes after step {guard.resumed_from}")
    for batch in guard.batches(stream.loader(num_workers=num_workers)):
        result = guard.step(loss, batch)
        if guard.num_updates % PRINTED_EVERY == 0:
            print(f"  step {guard.num_updates}: loss {result.loss.item():.6f}", flush=True)
        if guard.num_updates == killed_after:
            print(f"  killed after step {killed_after}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    guard.close()


def limit_memory(limit_mib):
    """From now on, more memory than this can't be had: a request that goes too far fails."""
    status = Path("/proc/self/status")
    if resource is None or not status.exists():
        sys.exit("this example needs a limit on a process's data, which Linux has")
    held = next(line for line in status.read_text().splitlines() if line.startswith("VmData:"))
    limit_bytes = int(held.split()[1]) * 1024 + limit_mib * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))


def load(path, limit_mib):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit_memory(limit_mib)
    try:
        np.load(path)
    except MemoryError as error:
        print(f"  MemoryError: {error}")
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def train_in_a_process(*words):
    """What it printed, of an error the last line; also shown."""
    done = subprocess.run([sys.executable, __file__, *map(str, words)], capture_output=True, text=True, check=False)
    shown = done.stdout
    if done.returncode == 1:
        shown += f"  {done.stderr.rstrip().splitlines()[-1]}\n"
    print(shown, end="", flush=True)
    return shown


def losses(shown):
    return dict(line.split(": loss ") for line in shown.splitlines() if ": loss " in line)


def run_all(folder, limit_mib):
    make_files(folder)
    size_mib = (folder / "x.npy").stat().st_size // 2**20
    print(f"np.load of {size_mib} MiB in a process that may take {limit_mib} MiB:", flush=True)
    load(folder / "x.npy", limit_mib)
    print(f"memfit.stream, within the same {limit_mib} MiB, killed on its way:", flush=True)
    first = train_in_a_process(folder, limit_mib, 0, "stopped", KILLED_AFTER)
    print("the same again, now with 2 workers:", flush=True)
    second = train_in_a_process(folder, limit_mib, 2, "stopped")
    print("a run that nothing stops:", flush=True)
    whole = losses(train_in_a_process(folder, limit_mib, 0, "whole"))
    is_same = bool(whole) and whole == {**losses(first), **losses(second)}
    print(f"the same losses: {is_same}")
    return 0 if is_same else 1


def main():
    if len(sys.argv) <= 2:
        with tempfile.TemporaryDirectory() as folder:
            return run_all(Path(folder), int(sys.argv[1]) if len(sys.argv) > 1 else 240)
    folder, limit_mib, num_workers, name, *killed_after = sys.argv[1:]
    torch.set_num_threads(1)
    limit_memory(int(limit_mib))
    train(Path(folder), int(num_workers), name, int(killed_after[0]) if killed_after else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
