"""Steps of JAX as plans run them, measured: what XLA says, and a guard in a process that really runs out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("optax")

SCRIPT = Path(__file__).parent / "plan_scripts" / "jax_guard.py"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of data segments are Linux's")
def test_a_guarded_step_survives_running_out_and_trains_the_same():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "120"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["retries"] >= 1
    assert found["gap"] < 1e-10 and found["value"] < 1e-12
