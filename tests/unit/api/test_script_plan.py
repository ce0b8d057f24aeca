"""What a plan of a script refuses; the plans themselves are tested in tests/unit/planner/test_script_space.py."""

import pytest

from memfit import PlanOptions, plan_script
from memfit.core.errors import BadInput, BadTarget
from memfit.processes import launch


@pytest.fixture
def no_runs(monkeypatch):
    monkeypatch.setattr(launch, "run_child", lambda *_, **options: pytest.fail("the script was run"))


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return path


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "a100-40gb", "budget": 0}, "a budget must be positive, but 0 was given"),
        ({"device": "a100-40gb", "budget": "50GiB"}, r"the budget of 50.0 GiB is more than NVIDIA A100"),
        ({"device": "cpu"}, "only CUDA devices can be simulated for a script, but 'cpu' was given"),
        ({"device": "t4", "precision": "fp8"}, "precision of a script's plan must be 'keep' or 'auto'"),
        ({"device": "t4", "options": PlanOptions(script_steps=0)}, "script_steps must be at least 1, but 0 was given"),
        ({"device": "t4", "count": 0}, "count must be at least 1, but 0 was given"),
        ({"device": "t4", "arguments": "--lr 1"}, r"arguments must be a list such as \['--lr', '1'\]"),
        ({"device": "t4", "allow": ["magic"]}, "'magic' is not something that can be allowed"),
        ({"device": "t4", "options": PlanOptions(measure=True)}, "measure is for plans of steps"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(script, no_runs, options, text):
    with pytest.raises(BadInput, match=text):
        plan_script(script, **options)


def test_there_must_be_a_script(tmp_path, no_runs):
    with pytest.raises(BadTarget, match="there is no file"):
        plan_script(tmp_path / "missing.py", device="t4")
