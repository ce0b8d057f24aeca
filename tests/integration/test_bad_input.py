"""What goes wrong on the user's side: one message with what was given, what was expected and what to do, no more.

Each case runs through Python and, where a file can hold it, through the command line as well.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from memfit.commands import main
from memfit.core.errors import BadBatch, BadFile, BadInput, BadLoss, BadModel, BadOptimizer, BadTarget

HEAD = """
import torch
from torch import nn

import memfit


def loss(model, batch):
    return model(batch).mean()


"""

# name: (body of a function that returns the arguments of a Job, the error, what its message must hold)
CASES = {
    "loss not scalar": (
        "return nn.Linear(2, 3), lambda model, batch: model(batch), torch.ones(4, 2)",
        BadLoss,
        ["the loss has shape (4, 3)", "a scalar is needed", "Reduce it, for example with .mean()"],
    ),
    "loss not a tensor": (
        "return nn.Linear(2, 3), lambda model, batch: {'loss': model(batch).mean()}, torch.ones(4, 2)",
        BadLoss,
        ["the loss function returned dict", "not a tensor", "return the scalar loss itself, such as `output.loss`"],
    ),
    "loss missing its return": (
        "return nn.Linear(2, 3), lambda model, batch: None, torch.ones(4, 2)",
        BadLoss,
        ["the loss function returned NoneType", "It must return the scalar loss itself"],
    ),
    "loss detached": (
        "return nn.Linear(2, 3), lambda model, batch: model(batch).detach().mean(), torch.ones(4, 2)",
        BadLoss,
        ["does not depend on any parameter that requires a gradient", "Check for torch.no_grad(), .detach()"],
    ),
    "model frozen": (
        "return nn.Linear(2, 3).requires_grad_(False), loss, torch.ones(4, 2)",
        BadLoss,
        ["does not depend on any parameter that requires a gradient", "or use mode='inference'"],
    ),
    "optimizer of another model": (
        "return nn.Linear(2, 3), loss, torch.ones(4, 2), torch.optim.Adam(nn.Linear(5, 7).parameters())",
        BadOptimizer,
        ["2 of the optimizer's 2 parameters are not the model's", "(7, 5), (7,)", "Make the optimizer from"],
    ),
    "optimizer not one": (
        "return nn.Linear(2, 3), loss, torch.ones(4, 2), 'adam'",
        BadOptimizer,
        ["must be a torch.optim.Optimizer, a callable that takes parameters, or None", "but str was given"],
    ),
    "optimizer made wrongly": (
        "return nn.Linear(2, 3), loss, torch.ones(4, 2), lambda parameters: list(parameters)",
        BadOptimizer,
        ["the optimizer callable returned list, not a torch.optim.Optimizer"],
    ),
    "model not one": (
        "return 'resnet50', loss, torch.ones(4, 2)",
        BadModel,
        ["must be a torch.nn.Module or a function that builds one", "but str was given"],
    ),
    "zero batch": (
        "return nn.Linear(2, 3), loss, torch.ones(0, 2)",
        BadBatch,
        ["an empty tensor of shape (0, 2)", "a batch needs at least 1 sample"],
    ),
    "empty batch": (
        "return nn.Linear(2, 3), loss, []",
        BadBatch,
        ["the batch holds no tensor (list was given)", "give the tensors one step works on"],
    ),
    "no batch": (
        "return nn.Linear(2, 3), loss, None",
        BadBatch,
        ["the batch holds no tensor (NoneType was given)", "give the tensors one step works on"],
    ),
    "batch function returns no batch": (
        "return nn.Linear(2, 3), loss, lambda n: n",
        BadBatch,
        ["the batch holds no tensor (int was given)"],
    ),
    "batch tensors disagree": (
        "return nn.Linear(2, 3), lambda m, b: (m(b[0]) - m(b[1])).mean(), (torch.ones(4, 2), torch.ones(3, 2))",
        BadBatch,
        ["the step failed in its forward", "disagree in their first dimension: 3, 4", "give tensors with the same"],
    ),
    "unknown precision": (
        "return nn.Linear(2, 3), loss, torch.ones(4, 2), None, 'fp7'",
        BadInput,
        ["precision must be one of fp32, fp16, bf16, amp-fp16, amp-bf16", "but 'fp7' was given"],
    ),
    "unknown mode": (
        "return nn.Linear(2, 3), loss, torch.ones(4, 2), None, None, 'testing'",
        BadInput,
        ["mode must be one of training, inference", "but 'testing' was given"],
    ),
}

FAILURES = {
    "forward": (
        "def loss_that_fails(model, batch):\n    return model(batch.reshape(3, 5)).mean()",
        "return nn.Linear(2, 3), loss_that_fails, torch.ones(4, 2)",
        ["in its forward at train.py:13 in loss_that_fails: RuntimeError", "return model(batch.reshape(3, 5)).mean()"],
    ),
    "module": (
        "class Net(nn.Module):\n    def forward(self, x):\n        return self.layer(x)",
        "return Net(), loss, torch.ones(4, 2)",
        ["in its forward at train.py:14 in forward: AttributeError", "no attribute 'layer'", "return self.layer(x)"],
    ),
    "backward": (
        "def hooked(model, batch):\n    y = model(batch)\n    y.register_hook(lambda g: g.none)\n    return y.mean()",
        "return nn.Linear(2, 3), hooked, torch.ones(4, 2)",
        ["in its backward at train.py:14 in <lambda>: AttributeError", "no attribute 'none'"],
    ),
    "model function": (
        "def build():\n    return nn.Linear(2, 3, colour='red')",
        "return build, loss, torch.ones(4, 2)",
        ["in its model function at train.py:13 in build: TypeError", "unexpected keyword argument 'colour'"],
    ),
    "optimizer function": (
        "def make(parameters):\n    return torch.optim.SGD(parameters, lr=-1.0)",
        "return nn.Linear(2, 3), loss, torch.ones(4, 2), make",
        ["in its optimizer function at train.py:13 in make: ValueError", "Invalid learning rate: -1.0"],
    ),
    "batch function": (
        "def make(n):\n    return torch.ones(n, 2)[n + 1]",
        "return nn.Linear(2, 3), loss, make",
        ["in its batch function at train.py:13 in make: IndexError", "out of bounds"],
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of a user; what loading the user's files leaves behind ends with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("train", None)


def write(folder: Path, body: str, extra: str = "") -> str:
    text = f"{HEAD}{extra}\n\n\ndef parts():\n    {body}\n\n\ndef job():\n    return memfit.Job(*parts())\n"
    (folder / "train.py").write_text(text)
    return "train.py:job"


def refuse(capsys, *arguments):
    """The message of a command that ends with exit code 2, one message and no trace of the machinery."""
    before = sorted(Path.cwd().rglob("*.html*"))
    code = main(list(arguments))
    written = capsys.readouterr()
    assert code == 2
    assert written.out == ""
    assert written.err.startswith("memfit: ")
    assert "Traceback" not in written.err
    assert sorted(Path.cwd().rglob("*.html*")) == before
    return written.err


def check(text, parts):
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize(("body", "error", "parts"), CASES.values(), ids=CASES)
def test_what_cannot_be_used_is_refused(folder, capsys, body, error, parts):
    # GIVEN a job with something wrong in it
    target = write(folder, body)
    namespace = {}
    exec(compile((folder / "train.py").read_text(), str(folder / "train.py"), "exec"), namespace)

    # THEN Python raises the error that is meant for it
    with pytest.raises(error) as refused:
        memfit.estimate(namespace["job"](), device="rtx-3090")
    check(str(refused.value), parts)

    # AND the command line prints the same and nothing more
    check(refuse(capsys, "estimate", target, "-d", "rtx-3090", "--html", "memory.html"), parts)


@pytest.mark.parametrize(("extra", "body", "parts"), FAILURES.values(), ids=FAILURES)
def test_a_step_that_fails_names_the_users_own_line(folder, capsys, extra, body, parts):
    target = write(folder, body, extra)
    namespace = {}
    exec(compile((folder / "train.py").read_text(), str(folder / "train.py"), "exec"), namespace)

    with pytest.raises(memfit.StepFailed) as failed:
        memfit.estimate(namespace["job"](), device="rtx-3090")
    check(str(failed.value), ["the step failed ", *parts])
    assert failed.value.__cause__ is not None

    check(refuse(capsys, "estimate", target, "-d", "rtx-3090"), ["the step failed ", *parts])


def test_after_a_failure_everything_is_as_before():
    # GIVEN a step that fails half-way
    model = nn.Linear(2, 3)
    weight = model.weight
    state = torch.get_rng_state()

    with pytest.raises(memfit.StepFailed):
        memfit.estimate(model, lambda m, b: m(torch.rand_like(b)).nothing, torch.ones(4, 2), device="rtx-3090")

    # THEN the model has its weights, and PyTorch computes as ever
    assert model.weight is weight
    assert not weight.is_meta
    assert torch.equal(torch.get_rng_state(), state)
    assert model(torch.ones(4, 2)).device.type == "cpu"


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device, without a device to be on."""

    @staticmethod
    def __new__(cls, *shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device="xla:0")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_a_model_on_two_devices_is_refused():
    model = nn.Linear(2, 3)
    model.register_buffer("scale", Elsewhere(3))

    with pytest.raises(BadModel, match=r"on mixed devices: cpu, xla:0\. Move the whole model to one device"):
        memfit.estimate(model, lambda m, b: m(b).mean(), torch.ones(4, 2), device="rtx-3090")


def test_a_batch_on_two_devices_is_refused():
    with pytest.raises(BadBatch, match=r"on mixed devices: cpu, xla:0\. Put them on one; any will do"):
        memfit.estimate(nn.Linear(2, 3), lambda m, b: m(b[0]).mean(), (torch.ones(4, 2), Elsewhere(4)), device="cpu")


def test_shapes_beside_tensors_are_one_device():
    model = nn.Linear(2, 3, device="meta")
    model.register_buffer("scale", torch.ones(3))

    assert memfit.estimate(model, lambda m, b: m(b).mean(), torch.ones(4, 2), device="cpu").peak_bytes > 0


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["-d", "rtx-390"], ["no device is called 'rtx-390'", "The nearest: rtx-3090", "Run `memfit devices`"]),
        (["-d", "24 bananas"], ["no device is called '24 bananas'", "give a size such as 24GiB"]),
        (["-d", "9999TiB"], ["no device has '9999TiB' of memory", "such as 24GiB"]),
        (["-d", "9" * 60 + "GiB"], ["more than any memory has", "such as 24GiB"]),
        (["-d", "rtx-3090", "-b", "0"], ["--batch-size must be at least 1", "but 0 was given"]),
        (["-d", "rtx-3090", "-b", "-4"], ["--batch-size must be at least 1", "but -4 was given"]),
        (["-d", "rtx-3090", "--workers", "-1"], ["--workers must be at least 0", "but -1 was given"]),
    ],
)
def test_bad_options_are_refused(folder, capsys, options, parts):
    target = write(folder, "return nn.Linear(2, 3), loss, torch.ones(4, 2)")

    check(refuse(capsys, "estimate", target, *options), parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("options", [[], ["-d", "cuda"], ["-d", "gpu"]])
@pytest.mark.parametrize("command", ["estimate", "max-batch", "compare"])
def test_a_missing_gpu_is_told(folder, capsys, command, options):
    target = write(folder, "return nn.Linear(2, 3), loss, torch.ones(4, 2)")

    text = refuse(capsys, command, target, *options)
    check(text, ["this machine has no CUDA device that PyTorch can use", "--device rtx-3090", "unlike scripts"])


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("train.py", ["'train.py' is not a target", "timm:NAME, torchvision:NAME, keras:NAME or hf:"]),
        ("trian.py:job", ["there is no file 'trian.py' in", "Write FILE.py:function with a path that exists"]),
        ("train.py:jbo", ["has no function 'jbo'", "Did you mean 'job'?", "one that returns a memfit.Job"]),
        ("train.py:parts", ["parts() in train.py returned tuple, not a memfit.Job", "Let it return memfit.Job("]),
        ("train.py:__name__", ["'__name__' in train.py is str, not a function that returns a memfit.Job"]),
    ],
)
@pytest.mark.parametrize("command", ["estimate", "max-batch", "compare"])
def test_a_target_that_is_not_there_is_explained(folder, capsys, command, target, parts):
    write(folder, "return nn.Linear(2, 3), loss, torch.ones(4, 2)")

    check(refuse(capsys, command, target, "-d", "rtx-3090"), parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("def job(:\n    pass\n", ["train.py can't be loaded: SyntaxError", "train.py, line 1"]),
        ("raise OSError('disk on fire')\n", ["train.py can't be loaded: OSError: disk on fire (train.py:1)"]),
        ("def job():\n    return 1 / 0\n", ["job() in train.py failed: ZeroDivisionError", "(train.py:2)"]),
        ("import sys\ndef job():\n    sys.exit(1)\n", ["job() in train.py failed: SystemExit: 1 (train.py:3)"]),
    ],
)
def test_a_file_that_fails_is_explained(folder, capsys, text, parts):
    (folder / "train.py").write_text(text)

    check(refuse(capsys, "estimate", "train.py:job", "-d", "rtx-3090"), parts)


@pytest.mark.parametrize("text", ["", "x", "1,,2", "0", "8,-1", "1e3"])
def test_bad_candidates_are_refused(folder, capsys, text):
    target = write(folder, "return nn.Linear(2, 3), loss, torch.ones(4, 2)")

    message = refuse(capsys, "max-batch", target, "-d", "1GiB", f"--candidates={text}")
    check(message, ["--candidates takes whole numbers from 1 up, separated by commas, such as 16,32,64", repr(text)])


NAMED = {
    "timm": ("timm:resnet5O", ["timm has no model 'resnet5O'", "Did you mean", "resnet50"]),
    "torchvision": ("torchvision:resnet5O", ["torchvision has no classifier 'resnet5O'", "Did you mean", "resnet50"]),
    "transformers": (
        "hf:GPT2LMHeadModle",
        [
            "'GPT2LMHeadModle' is neither a model class of transformers, nor a model type",
            "Did you mean GPT2LMHeadModel",
        ],
    ),
}


@pytest.mark.parametrize("package", NAMED)
def test_an_unknown_name_suggests_the_nearest(folder, capsys, package):
    if not any((Path(path) / package).is_dir() for path in sys.path):
        pytest.skip(f"{package} is not installed")
    target, parts = NAMED[package]

    with pytest.raises(BadTarget) as refused:
        memfit.named_job(target)
    check(str(refused.value), parts)
    check(refuse(capsys, "estimate", target, "-d", "rtx-3090"), parts)


def test_a_folder_that_is_no_model_is_refused(folder, capsys):
    if not any((Path(path) / "transformers").is_dir() for path in sys.path):
        pytest.skip("transformers is not installed")
    (folder / "config.json").write_text("{}")

    text = refuse(capsys, "estimate", "hf:config.json", "-d", "rtx-3090")
    check(text, ["config.json is not a configuration that transformers can read"])


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("missing/memory.html", ["there is no folder 'missing'", "Make it first, or name another"]),
        ("train.py/memory.html", ["there is no folder 'train.py'", "Make it first, or name another"]),
        (".", ["'.' is a folder", "Give the path of a file, such as memory.html"]),
    ],
)
def test_a_page_that_cannot_be_written_is_refused(folder, capsys, path, parts):
    target = write(folder, "return nn.Linear(2, 3), loss, torch.ones(4, 2)")

    check(refuse(capsys, "estimate", target, "-d", "rtx-3090", "--html", path), parts)

    # THEN Python refuses it too, and leaves nothing behind
    estimate = memfit.estimate(nn.Linear(2, 3), lambda m, b: m(b).mean(), torch.ones(4, 2), device="rtx-3090")
    before = sorted(folder.rglob("*"))
    with pytest.raises(BadFile, match=r"the page can't be written to '.*': .*\. Give the path of a file in a folder"):
        estimate.report(path)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser can write anywhere")
def test_a_folder_that_is_read_only_is_refused(folder, capsys):
    target = write(folder, "return nn.Linear(2, 3), loss, torch.ones(4, 2)")
    (folder / "locked").mkdir(mode=0o555)

    text = refuse(capsys, "estimate", target, "-d", "rtx-3090", "--html", "locked/memory.html")
    check(text, ["the folder 'locked' can't be written to", "Name another"])


def test_a_full_disk_leaves_nothing_half_written(folder, capsys, monkeypatch):
    # GIVEN a disk that takes a part of the page and no more
    target = write(folder, "return nn.Linear(2, 3), loss, torch.ones(4, 2)")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)

    # THEN one message says so and the part is gone
    text = refuse(capsys, "estimate", target, "-d", "rtx-3090", "--html", "memory.html")
    check(text, ["the page can't be written to 'memory.html': No space left on device", "Give the path of a file"])
    assert [path.name for path in folder.iterdir() if "html" in path.name] == []


def test_an_estimate_that_was_cut_off_is_refused():
    text = '{"format": "memfit.estimate", "version": 1, "subject": "Net"'

    with pytest.raises(BadFile, match="not an estimate written by memfit: JSONDecodeError"):
        memfit.Estimate.from_json(text)
