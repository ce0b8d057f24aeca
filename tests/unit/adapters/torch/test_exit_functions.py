import atexit
import threading

from memfit.adapters.torch.exit_functions import ExitFunctions
from memfit.adapters.torch.replacement import replaced


def test_functions_run_once_and_the_last_first():
    functions, said = ExitFunctions(), []
    with replaced(functions.replacements()):
        atexit.register(said.append, "first")
        atexit.register(said.append, "second")
        functions.run()
        functions.run()

    assert said == ["second", "first"]


def test_a_function_can_be_taken_back():
    functions, said = ExitFunctions(), []

    def say():
        said.append("said")

    with replaced(functions.replacements()):
        assert atexit.register(say) is say
        atexit.unregister(say)
        functions.run()

    assert said == []


def test_a_function_that_fails_does_not_keep_the_others_from_running(capsys):
    functions, said = ExitFunctions(), []

    def fail():
        raise ValueError("in vain")

    def leave():
        raise SystemExit(1)

    with replaced(functions.replacements()):
        for function in (lambda: said.append("last"), fail, leave):
            atexit.register(function)
        functions.run()

    assert said == ["last"]
    assert "ValueError: in vain" in capsys.readouterr().err


def test_threads_of_the_script_come_first():
    functions, said, go_on = ExitFunctions(), [], threading.Event()

    def work():
        go_on.wait()
        said.append("thread")

    with replaced(functions.replacements()):
        threading.Thread(target=work).start()
        atexit.register(said.append, "function")
        go_on.set()
        functions.run()

    assert said == ["thread", "function"]
