from pathlib import Path

import pytest
import torch

from memfit.core.stack import read_version
from memfit.snapshots.reader import Event
from memfit.snapshots.release import releases_of

MODULE = "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py"


def event(*frames):
    return Event("alloc", 0, 512, 0, 0, {"frames": list(frames)})


def call(line, name="_wrapped_call_impl", filename=MODULE):
    return {"name": name, "filename": filename, "line": line}


@pytest.mark.parametrize(("line", "releases"), [(1739, ((2, 6),)), (1778, ((2, 12), (2, 13))), (3, ())])
def test_the_line_at_which_modules_are_called(line, releases):
    assert releases_of([event(), event(call(1750, "_call_impl"), call(line))]) == releases


def test_a_compiled_module_goes_on_at_another_line():
    assert releases_of([event(call(1737)), event(call(1737), call(1739))]) == ((2, 6),)


@pytest.mark.parametrize(
    "frames", [None, 5, [None], [{}], [call(1739, filename="module.py")], [call("1739")], [call([])]]
)
def test_other_stacks_tell_nothing(frames):
    assert releases_of([Event("alloc", 0, 512, 0, 0, {"frames": frames})]) == ()


def test_the_installed_release_is_known():
    installed = read_version(torch.__version__)[:2]
    lines = Path(torch.nn.modules.module.__file__).read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if "def _wrapped_call_impl" in line)
    line = next(n for n in range(start, len(lines)) if "self._call_impl(*args" in lines[n]) + 1

    assert installed in releases_of([event(call(line))])
