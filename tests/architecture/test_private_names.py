"""Private names of PyTorch, Keras, TensorFlow and JAX stand only in `frameworks/*/internals.py`.

Seen are names that begin with an underscore, and modules that a framework calls its own: in an import, and as an
attribute of anything but `self`, unless memfit itself has an attribute of that name. Names in strings aren't seen.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FRAMEWORKS = Path(__file__).parents[2] / "src" / "memfit" / "frameworks"
PACKAGES = {"torch", "keras", "tensorflow", "jax", "jaxlib"}
PRIVATE_MODULES = ("keras.src", "tensorflow.python", "jax._src", "torch.testing._internal")
# Operators are known by their names in every trace; the rest is Python's own, or has one module for itself.
OPERATORS = ("torch.ops.aten.", "_ATEN.", "operators.")
ALLOWED = {
    "_getframe": "of sys, which documents it",
    "_current_frames": "of sys, which documents it",
    "_identity": "of multiprocessing's processes",
    "_extra_reducers": "of multiprocessing",
    "_TYPES": "of safetensors",
    "_quantize": "of bitsandbytes, in the module for its weights",
    "_roi_align": "of torchvision, in the module for its operators",
    "_memfit_is_in_front": "ours, on functions of the user's",
    "_untyped_storage": "of a storage that is being loaded",
    "_recursive_joint_graph_passes": "of the compiler, in its own part",
    "_unique_id": "of TensorFlow's variables, which none but these have",
}
# Libraries above PyTorch: each has one module, which knows the releases that it was seen with.
OF_LIBRARIES = {"lightning_guard.py", "transformers_trainer.py"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def find_private(files: list[Path]) -> Iterator[str]:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    own |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    passing = own | set(ALLOWED)
    for path, tree in trees.items():
        if path.name == "internals.py" or path.name in OF_LIBRARIES:
            continue
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                if name.split(".")[0] in PACKAGES and (
                    name.startswith(PRIVATE_MODULES) or any(map(is_private, name.split(".")))
                ):
                    yield f"{path.name}:{node.lineno}: {name}"
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in passing:
                text = ast.unparse(node)
                if not text.startswith(("self.", "cls.", *OPERATORS)):
                    yield f"{path.name}:{node.lineno}: {text}"


def test_private_names_are_in_internals_alone():
    files = sorted(FRAMEWORKS.rglob("*.py"))
    assert files, "no modules found: the check would pass on nothing"
    assert list(find_private(files)) == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from torch.nn.modules.conv import _ConvNd", "torch.nn.modules.conv._ConvNd"),
        ("import keras.src.backend", "keras.src.backend"),
        ("from tensorflow.python import pywrap", "tensorflow.python.pywrap"),
        ("tensor._version", "tensor._version"),
        ("torch._C._nn", "torch._C._nn"),
    ],
)
def test_a_private_name_is_caught(tmp_path, line, name):
    path = tmp_path / "module.py"
    path.write_text(line + "\n")

    assert f"module.py:1: {name}" in list(find_private([path]))


def test_own_names_and_operators_pass(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("class A:\n    _held: int\n\n\nother._held\ntorch.ops.aten._softmax\nsys._getframe(1)\n")

    assert list(find_private([path])) == []
