"""The memory of a Keras training step on PyTorch, measured: every allocation and free, by torch's profiler."""

import gc
from typing import Any

import keras
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.keras_models import Case
from memfit.frameworks.torch.verify.measure import allocations, find_peak

HOW = "greatest sum of live bytes of PyTorch's CPU allocator in two training steps, by its profiler"


def measure(case: Case) -> dict[str, Any]:
    """Greatest sum of live bytes in two training steps of a model that was just made; call it in a fresh process."""
    model, batch = case.make(), case.batch(case.batch_size)
    data = keras.tree.map_structure(torch.as_tensor, batch)
    # As `fit` begins: a subclassed model's gradients are not all cleared otherwise.
    model._symbolic_build(data_batch=data)
    model.zero_grad()
    # Tensors that share memory are one.
    held = {}
    for tensor in [*keras.tree.flatten(data), *(one.value for one in (*model.variables, *model.optimizer.variables))]:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        for _ in range(2):
            # Layers leave cycles behind that hold tensors: each step begins without those of the one before.
            gc.collect()
            model.train_step(data)
    return {"measured": sum(held.values()) + find_peak(allocations(watched))[0]}
