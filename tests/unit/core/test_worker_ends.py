import pytest

from memfit.core.worker_ends import describe_end


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "worker 1 was ended by SIGKILL before its last batch. The usual cause is memory"),
        (-11, "worker 1 was ended by SIGSEGV before its last batch. It crashed in native code"),
        (-15, "SIGTERM before its last batch. Another program killed it."),
        (3, "worker 1 ended with exit code 3 before its last batch; what it wrote is above."),
        (None, "exit code None"),
    ],
)
def test_how_a_worker_ended(code, text):
    assert text in describe_end("worker 1", code)
