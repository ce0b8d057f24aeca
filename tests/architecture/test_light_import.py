"""`import memfit` loads no framework: scripts that only want a size or a device must not wait for one."""

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
HEAVY = ("torch", "jax", "tensorflow", "keras", "numpy", "transformers", "timm", "rich")


def heavy_modules_after(statement: str) -> list[str]:
    """The heavy modules a fresh interpreter holds after a statement."""
    code = f"import sys\n{statement}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_import_is_light():
    # A package without its __init__ would import too, and load nothing.
    assert heavy_modules_after("import memfit\nassert memfit.__file__, 'no __init__.py'") == []


def test_a_heavy_import_would_be_seen():
    # rich is a base dependency, so it is there to be imported wherever this test runs.
    assert heavy_modules_after("import rich") == ["rich"]


def test_a_result_from_a_file_is_shown_whole_in_a_fresh_interpreter():
    # Nothing but the class has been asked for, and no verb.
    statement = (
        "import memfit\n"
        "from tests.unit.reports.builders import make_estimate\n"
        "memfit.Estimate\n"
        "assert 'memfit.api.estimate' not in sys.modules\n"
        "text = str(make_estimate())\n"
        "assert 'activation' in text and len(text.splitlines()) > 9, text\n"
        "assert 'activation' in make_estimate()._repr_html_()"
    )
    assert "torch" not in heavy_modules_after(f"sys.path.insert(0, {str(SOURCE.parent)!r})\n{statement}")
