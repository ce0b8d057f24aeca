import importlib
import importlib.util
import subprocess
import sys

import pytest
import torch

from memfit.adapters.torch.torchvision_operators import define_missing_operators
from tests.unit.adapters.torch.builders import observe

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="not installed: torchvision")

SCRIPT = """
import sys
from memfit.adapters.torch import torchvision_operators as operators

try:
    import torchvision
    works_alone = True
except RuntimeError:
    works_alone = False

operators.define_missing_operators()
operators.define_missing_operators()
assert (operators._library is None) is works_alone

import torch
import torchvision.models
import torchvision.ops

assert "torchvision" in sys.modules
model = torchvision.models.get_model("resnet18", weights=None).eval()
assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)
print("ok")
"""


def test_torchvision_can_be_imported_beside_any_build_of_torch():
    # In a process of its own: an import that failed can't be undone in this one.
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)

    assert done.stdout.strip() == "ok", done.stderr


def test_detectors_keep_every_box():
    # GIVEN torchvision's suppression of overlapping boxes, whose result depends on data
    define_missing_operators()
    importlib.import_module("torchvision.ops")

    def work(boxes, scores):
        return tuple(torch.ops.torchvision.nms(boxes, scores, 0.5).shape)

    # WHEN it runs on the simulated device
    shape, traced = observe(work, torch.empty(7, 4), torch.empty(7))

    # THEN every box is taken to be kept, and a note says so
    assert shape == (7,)
    assert [note.code for note in traced.notes] == ["data-dependent-shape"]
