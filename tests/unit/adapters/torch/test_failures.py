import pytest
import torch
from torch import nn

from memfit.adapters.torch import failures
from memfit.adapters.torch.origin import SourceNames
from memfit.core.errors import BadInput, BadLoss, StepFailed
from tests.unit.adapters.torch.builders import line_of, run
from tests.unit.adapters.torch.sessions import running

DATA = torch.empty(4, 10)


def test_the_message_names_part_line_type_and_text():
    def loss(model, batch):
        return model(batch @ batch)

    with pytest.raises(StepFailed) as caught:
        run(nn.Linear(10, 2), DATA, loss=loss)

    text = str(caught.value)
    assert text.startswith("the step failed in its forward at ")
    assert f"test_failures.py:{line_of(loss)} in loss: RuntimeError: " in text
    assert text.endswith("    return model(batch @ batch)")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_line_is_the_innermost_of_the_users_own():
    class Broken(nn.Module):
        def forward(self, data):
            raise KeyError("missing")

    with pytest.raises(StepFailed, match=f"test_failures.py:{line_of(Broken.forward)} in forward: KeyError"):
        run(Broken(), DATA)


def test_a_failure_of_the_backward_pass_says_so():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, data):
            return data * 2

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("no gradient")

    with pytest.raises(StepFailed, match=r"in its backward.*ValueError: no gradient"):
        run(nn.Linear(10, 2), DATA, loss=lambda m, b: Broken.apply(m(b)).sum())


def test_a_failure_of_the_optimizer_says_so():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no step")

    with pytest.raises(StepFailed, match=r"in its optimizer step.*ValueError: no step"):
        run(nn.Linear(10, 2), DATA, optimizer=lambda p: Broken(p, lr=0.1))


def test_an_error_without_a_message():
    with pytest.raises(StepFailed, match="AssertionError: no message"), failures.explained("forward"):
        raise AssertionError


def test_lines_are_joined():
    with pytest.raises(StepFailed, match="ValueError: one two"), failures.explained("forward"):
        raise ValueError("one\n  two")


def test_errors_of_memfit_pass_as_they_are():
    with pytest.raises(BadInput, match="as it is"), failures.explained("forward"):
        raise BadInput("as it is")


def test_interruptions_pass_as_they_are():
    with pytest.raises(KeyboardInterrupt), failures.explained("forward"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: 3.0, "returned float, not a tensor"),
        (lambda m, b: {"loss": m(b).sum()}, "returned dict, not a tensor"),
        (lambda m, b: None, "returned NoneType, not a tensor"),
        (lambda m, b: m(b), r"the loss has shape \(4, 2\)"),
        (lambda m, b: m(b).detach().sum(), "does not depend on any parameter"),
        (lambda m, b: torch.zeros(()), "does not depend on any parameter"),
    ],
)
def test_a_loss_that_cannot_be_differentiated(loss, message):
    with pytest.raises(BadLoss, match=message):
        run(nn.Linear(10, 2), DATA, loss=loss)


def test_a_loss_of_one_element_is_fine():
    run(nn.Linear(10, 2), DATA, loss=lambda m, b: m(b).sum().view(1, 1))


def test_without_training_anything_may_be_returned():
    run(nn.Linear(10, 2), DATA, loss=lambda m, b: {"logits": m(b)}, training=False)


def caught(work):
    with pytest.raises(BaseException) as error:
        work()
    return error.value


def fail(message="one\n  two"):
    raise ValueError(message)


def test_an_error_in_one_line():
    text = failures.one_line(caught(fail))

    assert text.startswith("ValueError: one two at ")
    assert text.endswith(f"test_failures.py:{line_of(fail)} in fail")
    assert "\n" not in text


def test_an_error_in_one_line_names_the_line_outside_of_pytorch():
    def work():
        nn.Linear(10, 2)(torch.zeros(3))

    text = failures.one_line(caught(work))

    assert text.startswith("RuntimeError: ")
    assert text.endswith(f"test_failures.py:{line_of(work)} in work")


def test_an_error_without_message_or_place_in_one_line():
    assert failures.one_line(AssertionError()) == "AssertionError: no message"
    assert failures.one_line(SystemExit(3)) == "SystemExit: 3"


def test_an_error_that_the_simulation_is_the_reason_of_says_what_to_do():
    error = caught(lambda: fail("no fake impl for mine::scale"))

    assert failures.one_line(error).endswith("register one with torch.library.register_fake.")


def suspected(work, stand_ins=()):
    """What is suspected of the failure of `work` in a session."""
    with running():
        try:
            work()
        except Exception as error:
            return failures.suspicion(error, stand_ins)
    raise AssertionError("it did not fail")


def matrix(*size, **options):
    return torch.rand(*size, device="cuda", **options)


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda: matrix(2, 3) @ matrix(3, 2, dtype=torch.float16), "simulated device refused it"),
        (lambda: matrix(2, 3) + torch.rand(2, 3), "simulated device refused it"),
        (lambda: torch.utils.dlpack.to_dlpack(matrix(2)), "a shape and no values"),
        (lambda: matrix(2).untyped_storage().tolist(), "a shape and no values"),
    ],
)
def test_failures_of_the_simulation_are_suspected(work, text):
    assert text in suspected(work)


def raise_it(error):
    raise error


@pytest.mark.parametrize(
    "work",
    [
        lambda: matrix(2, 3) @ matrix(2, 3),
        lambda: matrix(2, 3).view(7),
        lambda: nn.functional.linear(matrix(2, 3)),
        lambda: raise_it(OSError("meta.json is missing")),
        lambda: raise_it(RuntimeError("memfit is a word, and so is meta")),
        lambda: raise_it(ValueError("no value was read")),
    ],
)
def test_the_scripts_own_failures_are_not(work):
    assert suspected(work) == ""


def take_first(values, error=None):
    found = list(values)
    for value in found:
        print(value)
    raise error or IndexError(found)


def test_values_that_stand_in_are_suspected_where_the_failing_code_read_them():
    name, first = SourceNames().short(__file__), line_of(take_first)
    read, shown, elsewhere = f"{name}:{first}", f"{name}:{first + 2}", f"other.py:{first}"

    assert read in suspected(lambda: take_first([]), [elsewhere, read, shown])
    assert suspected(lambda: take_first([]), [elsewhere]) == ""
    # What was read is only shown.
    assert suspected(lambda: take_first([]), [shown]) == ""
    # An error that no value is the reason of.
    assert suspected(lambda: take_first([], OSError("disk")), [read]) == ""


def test_an_error_in_our_own_code_is_suspected(monkeypatch):
    monkeypatch.setattr("memfit.adapters.torch.look._carry", None)
    assert "memfit's own code" in suspected(lambda: matrix(2).to("meta"))


def test_advice_for_a_single_step_is_not_given_to_a_script():
    with running(), pytest.raises(RuntimeError) as caught:
        matrix(2) + torch.rand(2)
    assert "class weights" not in failures.one_line(caught.value)
    with pytest.raises(StepFailed, match="class weights"):
        run(nn.Linear(10, 2), DATA, loss=lambda model, batch: (model(batch) + torch.rand(4, 2)).sum())
