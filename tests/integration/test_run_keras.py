"""Scripts of Keras under `memfit run` and `memfit dryrun`: unmodified, in a control group that kills them otherwise."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memfit.catalogue.host import memory_groups
from memfit.core.dryrun import DryRun, Outcome
from memfit.core.supervised import SupervisedRun
from memfit.core.units import MIB

pytest.importorskip("keras")

ROOT = Path(__file__).parents[2]
LIMITED = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="control groups are Linux's")

# Much to keep for the backward pass, little to compute.
PERCEPTRON = """
import sys
import numpy as np, keras
from keras import layers

keras.utils.set_random_seed(0)
batch, num_steps, norms = int(sys.argv[1]), 2, "norms" in sys.argv
inputs = x = keras.Input((64, 64, 8))
for number in range(5):
    y = layers.Dense(8, activation="gelu", name=f"dense{number}")(x)
    if norms:
        y = layers.BatchNormalization(name=f"norm{number}")(y)
    x = layers.Add(name=f"add{number}")([x, y])
outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
model = keras.Model(inputs, outputs)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
random = np.random.default_rng(0)
images = random.standard_normal((batch * num_steps, 64, 64, 8), dtype=np.float32)
labels = random.integers(0, 10, batch * num_steps)
history = model.fit(images, labels, batch_size=batch, shuffle=False, verbose=0)
print("loss", history.history["loss"][0], file=sys.stderr)
"""

TRANSFORMER = """
import sys
import numpy as np, keras
from keras import layers

keras.utils.set_random_seed(0)
batch, num_steps, length = int(sys.argv[1]), 2, 256
tokens = keras.Input((length,), dtype="int32")
x = layers.Embedding(500, 64)(tokens)
for number in range(4):
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(8, 8, name=f"attention{number}")(x, x))
    y = layers.Dense(128, activation="gelu")(x)
    x = layers.LayerNormalization()(x + layers.Dense(64)(y))
model = keras.Model(tokens, layers.Dense(500)(x))
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
random = np.random.default_rng(0)
data = random.integers(0, 500, (batch * num_steps, length + 1)).astype("int32")
history = model.fit(data[:, :-1], data[:, 1:], batch_size=batch, shuffle=False, verbose=0)
print("loss", history.history["loss"][0], file=sys.stderr)
"""


def environment(folder, backend):
    own = {"KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    return {**os.environ, **own, "PYTHONPATH": paths, "MEMFIT_CACHE": str(folder / "cache")}


@pytest.fixture
def limited():
    """Makes a control group of version 1 with a limit; gives what puts a program into it."""
    levels = [levels[0] for is_unified, levels in memory_groups() if not is_unified]
    if not levels:
        pytest.skip("there is no memory controller of version 1 here")
    folder = levels[0] / f"memfit-test-keras-{os.getpid()}"

    def enter(limit_bytes):
        try:
            folder.mkdir(exist_ok=True)
            (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error.strerror}")
        return lambda: (folder / "cgroup.procs").write_text(str(os.getpid()))

    yield enter
    for _ in range(100):
        if not folder.exists():
            return
        with contextlib.suppress(OSError):
            folder.rmdir()
        time.sleep(0.05)


def kept_alive(tmp_path, limited, backend, text, batch, limit_bytes, *words):
    """Through under `memfit run`; gives the run and what was said."""
    script = tmp_path / "train.py"
    script.write_text(text)
    command = [sys.executable, "-m", "memfit", "run", "--json", str(script), str(batch), *words]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        env=environment(tmp_path, backend),
        cwd=tmp_path,
        preexec_fn=limited(limit_bytes),
    )
    assert done.returncode == 0, done.stderr
    return SupervisedRun.from_json(done.stdout), done.stderr


def plain(tmp_path, backend, batch, *words, preexec_fn=None):
    """The same script by itself."""
    command = [sys.executable, str(tmp_path / "train.py"), str(batch), *words]
    options = {"env": environment(tmp_path, backend), "cwd": tmp_path, "preexec_fn": preexec_fn}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def loss_of(text):
    return float(re.findall(r"^loss (\S+)", text, re.MULTILINE)[-1])


@LIMITED
@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_fit_gets_through_where_a_step_does_not_fit(tmp_path, limited, backend):
    pytest.importorskip(backend)

    run, said = kept_alive(tmp_path, limited, backend, PERCEPTRON, 400, 1250 * MIB)

    assert run.limit_of == "container"
    # A step that fits would need none of these.
    assert "memory ran out; going on with" in said or "planned for" in said or len(run.attempts) > 1
    assert loss_of(said) > 0


@LIMITED
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
@pytest.mark.parametrize(
    ("text", "batch", "words"),
    [(PERCEPTRON, 400, []), (PERCEPTRON, 400, ["norms"]), (TRANSFORMER, 96, [])],
    ids=["perceptron", "batch norms", "transformer"],
)
def test_a_fit_that_the_kernel_kills_trains_the_same(tmp_path, limited, backend, text, batch, words):
    pytest.importorskip(backend)
    # Batch norms keep a batch whole.
    needed = {"tensorflow": 1450, "jax": 1450, "torch": 1650}[backend] if words else 1250
    limit_bytes = needed * MIB
    _, said = kept_alive(tmp_path, limited, backend, text, batch, limit_bytes, *words)

    killed = plain(tmp_path, backend, batch, *words, preexec_fn=limited(limit_bytes))
    through = plain(tmp_path, backend, batch, *words)

    assert killed.returncode == -signal.SIGKILL
    assert "Approximate" not in said
    assert loss_of(said) == pytest.approx(loss_of(through.stderr), rel=1e-3)


def dryrun(tmp_path, backend, *options, text=PERCEPTRON, batch=64):
    script = tmp_path / "train.py"
    script.write_text(text)
    command = [sys.executable, "-m", "memfit", "dryrun", "--json", *options, str(script), str(batch)]
    done = subprocess.run(
        command, env=environment(tmp_path, backend), cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    return done, DryRun.from_json(done.stdout)


def test_a_dry_run_says_what_a_step_needs_and_trains_nothing(tmp_path):
    pytest.importorskip("tensorflow")

    done, found = dryrun(tmp_path, "tensorflow", batch=8)

    assert (found.outcome, found.fits, done.returncode) == (Outcome.COMPLETED, True, 0)
    assert found.estimate.batch_size == 8
    # Five layers keep at least their outputs.
    assert found.estimate.peak_bytes > 5 * 8 * 64 * 64 * 8 * 4
    assert "loss" not in done.stderr
    assert any(note.code == "keras-first-fit" for note in found.estimate.notes)


def test_a_dry_run_of_what_does_not_fit_returns_3(tmp_path):
    pytest.importorskip("jax")

    done, found = dryrun(tmp_path, "jax", "--device", "512MiB", batch=512)

    assert (found.outcome, found.fits, done.returncode) == (Outcome.OUT_OF_MEMORY, False, 3)
    assert "loss" not in done.stderr


OWN_STEP = """
import os, sys
os.environ["KERAS_BACKEND"] = "tor" + "ch"
import keras, numpy, torch

class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(3)
        self.layer.build((None, 4))
        self.built = True

    def train_step(self, data):
        loss = (self.layer(data) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
        return {"loss": loss}

model = Model()
model.compile(optimizer="adam")
model.fit(numpy.ones((8, 4), "float32"), batch_size=8, verbose=0)
"""
BY_ITSELF = """
import tensorflow as tf
from train_torch import train
train(tf.ones((8, 4)).numpy())
"""
IN_ANOTHER_FILE = """
import torch

def train(batch):
    layer = torch.nn.Linear(4, 3).cuda()
    optimizer = torch.optim.Adam(layer.parameters())
    for _ in range(9):
        layer(torch.tensor(batch).cuda()).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("device", ["t4", "cpu"])
def test_a_step_of_ones_own_on_pytorch_that_only_running_tells(tmp_path, device):
    pytest.importorskip("torch")

    done, found = dryrun(tmp_path, "tensorflow", "--device", device, text=OWN_STEP)

    assert (found.num_steps, found.fits, done.returncode) == (1, True, 0)


def test_a_script_that_imports_tensorflow_and_trains_with_pytorch_runs_on_the_simulated_gpu(tmp_path):
    pytest.importorskip("tensorflow")
    pytest.importorskip("torch")
    (tmp_path / "train_torch.py").write_text(IN_ANOTHER_FILE)

    done, found = dryrun(tmp_path, "tensorflow", "--device", "t4", text=BY_ITSELF)

    assert "the script failed without a GPU for PyTorch: it runs once more, on the simulated GPU" in done.stderr
    assert (found.outcome, found.num_steps, done.returncode) == (Outcome.COMPLETED, 3, 0)


BOTH = """
import numpy, keras
from prepare import prepare

prepare()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
model.compile("sgd", "mse")
model.fit(numpy.ones((8, 4), "float32"), numpy.ones((8, 3), "float32"), verbose=0)
"""
PREPARE = """
import torch

def prepare():
    layer = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(torch.ones(2, 4)).mean().backward()
    optimizer.step()
"""


def test_an_update_by_pytorch_does_not_hide_the_fit_that_follows(tmp_path):
    pytest.importorskip("tensorflow")
    pytest.importorskip("torch")
    (tmp_path / "prepare.py").write_text(PREPARE)

    done, found = dryrun(tmp_path, "tensorflow", "--device", "t4", text=BOTH)

    assert "once more" not in done.stderr
    assert (found.outcome, found.num_steps, found.fits, done.returncode) == (Outcome.COMPLETED, 1, True, 0)
    assert any(note.code == "keras-first-fit" for note in found.estimate.notes)


PREDICTS = """
import numpy, keras, torch

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
model.predict(numpy.ones((8, 4), "float32"), verbose=0)
"""


def test_a_script_that_trains_nothing_and_imports_pytorch_runs_once(tmp_path):
    pytest.importorskip("tensorflow")
    pytest.importorskip("torch")

    done, found = dryrun(tmp_path, "tensorflow", "--device", "t4", text=PREDICTS)

    assert "once more" not in done.stderr
    assert found.error.startswith("the script called no `fit` or `train_on_batch` of a Keras model")
    assert (found.outcome, done.returncode) == (Outcome.NO_STEP, 5)
