"""Cases that are run in another process: whatever happens there is told here."""

from tests.contract import child
from tests.contract.child import Outcome

PASSING = "def test_passes():\n    pass\n\n\n"
SKIPPING = "def test_skips():\n    import pytest\n\n    pytest.skip('no such notion')\n\n\n"
FAILING = "def test_fails():\n    assert 1 + 1 == 3\n\n\n"
ENDING = "def test_ends():\n    import os\n\n    os._exit(7)\n\n\ndef test_never_begins():\n    pass\n"


def test_every_case_has_its_outcome_even_if_the_process_ends_early(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "test_some.py").write_text(PASSING + SKIPPING + FAILING + ENDING, encoding="utf-8")
    nodes = {name: f"test_some.py::test_{name}" for name in ("passes", "skips", "fails", "ends", "never_begins")}

    found = child.run(list(nodes.values()), "torch", tmp_path)

    outcomes = {name: found[node] for name, node in nodes.items()}
    assert outcomes["passes"] == Outcome("passed")
    assert outcomes["skips"] == Outcome("skipped", "no such notion")
    assert outcomes["fails"].kind == "failed" and "assert (1 + 1) == 3" in outcomes["fails"].text
    for name in ("ends", "never_begins"):
        assert outcomes[name].kind == "failed" and "ended with 7 before this case did" in outcomes[name].text
