import importlib
import importlib.util
import subprocess
import sys

import pytest
import torch

from memfit.core.timeline import Category
from memfit.frameworks.torch.kernels.torchvision_operators import define_missing_operators
from tests.unit.frameworks.torch.builders import observe
from tests.unit.frameworks.torch.sessions import codes, made, running

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="not installed: torchvision")

SCRIPT = """
import sys, warnings
# The development environment mends the import for plain code too: without that.
sys.meta_path[:] = [finder for finder in sys.meta_path if finder.__module__ != "torchvision_import"]
from memfit.frameworks.torch.kernels import torchvision_operators as operators

try:
    import torchvision
    works_alone = True
except RuntimeError:
    works_alone = False

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    operators.define_missing_operators()
    operators.define_missing_operators()
assert (operators._library is None) is works_alone
assert ["don't match this build" in str(warning.message) for warning in told] == [True] * (not works_alone), told

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


WATCHED = """
import sys
from memfit.frameworks.torch.kernels import torchvision_operators as operators
from memfit.frameworks.torch.shapes.imports import on_import

with on_import({"torchvision": operators.define_missing_operators}, {}):
    import torchvision
assert "torchvision._autograd_registrations" in sys.modules
print(torchvision.models.resnet18.__name__)
"""


def test_a_watched_script_imports_torchvision():
    # The environment's hook, where there is one, runs the package's code in a module that has failed once.
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=120)

    assert done.stdout.strip() == "resnet18", done.stderr


PLAIN = """
import warnings
warnings.simplefilter("error", RuntimeWarning)
import torch
import torchvision
from torchvision.ops import nms, roi_align

boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 10, 10], [20, 20, 30, 30], [0, 0, 9, 10]])
assert nms(boxes, torch.tensor([0.5, 0.9, 0.1, 0.2]), 0.5).tolist() == [1, 2]

# The mean of a rising ramp over a box is the ramp's value at the box's middle.
data = torch.arange(64.0).reshape(1, 1, 8, 8).requires_grad_()
out = roi_align(data, torch.tensor([[0.0, 1, 1, 5, 5]]), 1, sampling_ratio=2, aligned=True)
assert out.item() == 8 * 2.5 + 2.5
out.sum().backward()
assert abs(data.grad.sum().item() - 1) < 1e-6

from transformers import BertForSequenceClassification
import sys
assert "memfit.commands" not in sys.modules
print("ok")
"""


def test_plain_code_imports_torchvision_in_the_development_environment():
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, timeout=120)

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


def test_regions_are_cut_out_of_feature_maps_with_their_gradient():
    define_missing_operators()
    ops = importlib.import_module("torchvision.ops")
    with running() as session:
        data = torch.randn(2, 16, 20, 30, device="cuda", requires_grad=True)
        boxes = torch.zeros(7, 5, device="cuda")
        out = ops.roi_align(data, boxes, (3, 4), spatial_scale=0.5, sampling_ratio=2)
        shapes = tuple(out.shape), out.is_cuda
        out.sum().backward()
        gradient = data.grad.shape

    assert shapes == ((7, 16, 3, 4), True)
    assert gradient == (2, 16, 20, 30)
    assert [b.size_bytes for b in made(session, op="torchvision.roi_align")] == [7 * 16 * 3 * 4 * 4]
    assert [b.size_bytes for b in made(session, op="_roi_align_backward")] == [2 * 16 * 20 * 30 * 4]


def test_a_detector_trains():
    define_missing_operators()
    detection = importlib.import_module("torchvision.models.detection")
    with running() as session:
        model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
            weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64
        ).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        images = [torch.rand(3, 64, 64).cuda() for _ in range(2)]
        boxes = torch.tensor([[1.0, 1.0, 30.0, 30.0], [5.0, 5.0, 60.0, 40.0]])
        targets = [{"boxes": boxes.cuda(), "labels": torch.tensor([1, 2]).cuda()} for _ in images]
        losses = model(images, targets)
        sum(losses.values()).backward()
        optimizer.step()
        names = sorted(losses)
        without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]

    assert names == ["loss_box_reg", "loss_classifier", "loss_objectness", "loss_rpn_box_reg"]
    assert without == []
    assert session.counter.num_steps == 1
    assert made(session, category=Category.GRADIENT)
    assert set(codes(session)) <= {"data-dependent-shape", "made-up-choice", "stand-in-value"}
