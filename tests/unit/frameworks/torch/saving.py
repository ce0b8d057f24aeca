"""A dry run's checkpoints without the rest of the simulation: shape-only tensors that say they are on the GPU."""

from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from memfit.core.patching import Replacement, replaced
from memfit.core.redirected_files import LAYER, RedirectedFiles, remove_made, unredirected
from memfit.frameworks.torch.script.checkpoints import Checkpoints
from memfit.frameworks.torch.shapes.device_labels import address_replacements

GPU = torch.device("cuda", 0)


class Shown(TorchFunctionMode):
    """Shows tensors of the meta device on the GPU, as the simulation does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        if func == torch.Tensor.is_meta.__get__:
            return False
        return GPU if func == torch.Tensor.device.__get__ and answer.type == "meta" else answer


class Places:
    """Counts what arrives on the simulated device."""

    def __init__(self):
        self.arrived = []

    def put(self, tensor, device):
        with torch._C.DisableTorchFunction():
            self.arrived.append((tuple(tensor.shape), tensor.dtype, device, None if tensor.is_meta else tensor.clone()))
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    @property
    def num_bytes(self):
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype, _, _ in self.arrived)


class Run:
    """What a test sees of a dry run."""

    def __init__(self, folder, private=False, **options):
        self.notes = []
        self.places = Places()
        self.folder = folder
        self.files = None if private else RedirectedFiles(str(folder), report=self.report)
        self.checkpoints = Checkpoints(self.files, self.report, self.places.put, **options)

    def report(self, code, text):
        self.notes.append((code, text))

    def codes(self):
        return [code for code, _ in self.notes]

    @property
    def redirected(self):
        """The files written, by the path the script gave, and where they are."""
        with unredirected():
            layer = Path(self.folder, LAYER)
            paths = [path for path in layer.rglob("*") if path.is_file() and not path.is_symlink()]
            return {f"/{path.relative_to(layer)}": str(path) for path in paths}


@contextmanager
def dry_run(folder, num_devices=1, **options):
    Path(folder).mkdir(exist_ok=True)
    run = Run(folder, **options)
    devices = [
        Replacement(torch.cuda, "device_count", lambda: num_devices),
        Replacement(torch.cuda, "current_device", lambda: 0),
    ]
    with (
        run.files.in_place() if run.files else nullcontext(),
        replaced([*devices, *address_replacements(), *run.checkpoints.replacements()]),
        Shown(),
    ):
        yield run
    remove_made(folder)


def simulated(*size, **options):
    return torch.empty(*size, device="meta", **options)


def really(tensor):
    """Where a tensor is, whatever it is shown as."""
    with torch._C.DisableTorchFunction():
        return tensor.device.type
