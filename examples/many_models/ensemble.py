"""An ensemble with one member in memory at a time: `python examples/many_models/ensemble.py [MEMBERS] [FOLDER]`."""

import gc
import os
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file
from torch import nn

import memfit

WIDTH, CLASSES, FEATURES, BATCH_SIZE, NUM_BATCHES = 2048, 10, 64, 512, 2


def build():
    layers = [nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(*layers)


def predict(model, batch):
    return model(batch).softmax(-1)


class Peak:
    """The most memory that the process had in a `with` block beyond what it had before."""

    def __enter__(self):
        gc.collect()
        self._process, self._ended = psutil.Process(), threading.Event()
        self.before = self.most = self._own_bytes()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._ended.is_set():
            self.most = max(self.most, self._own_bytes())
            time.sleep(0.002)

    def _own_bytes(self):
        memory = self._process.memory_info()
        # Pages of files that are mapped while they are read belong to the system, which takes them back at any time.
        return memory.rss - getattr(memory, "shared", 0)

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    @property
    def mib(self):
        return (self.most - self.before) / 2**20


def main():
    num_members = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else "out/ensemble")
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    files = []
    for seed in range(num_members):
        torch.manual_seed(seed)
        files.append(folder / f"member-{seed}.safetensors")
        save_file(build().state_dict(), files[-1])
    size = os.path.getsize(files[0]) / 2**20
    print(f"{num_members} members of {size:.1f} MiB each, {NUM_BATCHES} batches of {BATCH_SIZE}")
    batches = [torch.randn(BATCH_SIZE, FEATURES) for _ in range(NUM_BATCHES)]
    members = [(build, file) for file in files]
    # What is needed once, such as PyTorch's own libraries, is no part of the comparison.
    memfit.ensemble(members[:1], predict, batches[:1], budget="20MiB")

    found = {}
    for budget in (None, "20MiB"):
        with Peak() as peak:
            found[budget] = memfit.ensemble(members, predict, batches, budget=budget)
        name = f"one at a time, {budget}" if budget else "one at a time"
        print(f"{name + ':':<24} {peak.mib:6.1f} MiB more than before")
    with Peak() as peak:
        expected = all_at_once(files, batches)
    print(f"all at once:             {peak.mib:6.1f} MiB more than before")
    for budget, outputs in found.items():
        difference = max((one - other).abs().max().item() for one, other in zip(outputs, expected, strict=True))
        print(f"largest difference {'within ' + budget if budget else 'without a budget'}: {difference:.1e}")


def all_at_once(files, batches):
    from safetensors.torch import load_file

    models = []
    for file in files:
        models.append(build().eval())
        models[-1].load_state_dict(load_file(file))
    with torch.no_grad():
        return [torch.stack([predict(model, batch) for model in models]).mean(0) for batch in batches]


if __name__ == "__main__":
    main()
