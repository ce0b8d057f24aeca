import pytest
import torch
from torch import nn

from memfit.core.errors import BadInput, BadLoss, StepFailed
from memfit.core.user_code import SourceNames
from memfit.frameworks.torch.shapes import failures
from memfit.frameworks.torch.shapes.failures import may_reach
from memfit.frameworks.torch.shapes.origin import HIDDEN_FOLDERS
from tests.unit.frameworks.torch.builders import line_of, run
from tests.unit.frameworks.torch.sessions import running

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


def failing_at(name, then=""):
    """A function that fails, in a file of PyTorch's, or has `then` called."""
    made = {}
    text = f"def work(*given):\n    {then or 'raise TypeError(1)'}"
    exec(compile(text, HIDDEN_FOLDERS[0] + name, "exec"), made)
    return made["work"]


def own_mistake():
    raise ValueError("my own mistake")


def wrapped_compiler():
    try:
        failing_at("compiled_graph")()
    except TypeError:
        raise RuntimeError("training failed") from None


def endless():
    first, second = ValueError(1), ValueError(2)
    first.__cause__, second.__cause__ = second, first
    raise first


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (failing_at("compiled_graph"), True),
        (failing_at("_inductor/output_code.py"), True),
        (failing_at("_functorch/_aot_autograd/runtime_wrappers.py"), True),
        # The compiler's own complaint, and its wrapper around code that isn't compiled.
        (failing_at("_dynamo/eval_frame.py"), True),
        (lambda: failing_at("_dynamo/eval_frame.py", "given[0]()")(failing_at("nn/functional.py")), False),
        (lambda: failing_at("_dynamo/eval_frame.py", "given[0]()")(own_mistake), False),
        (lambda: failing_at("compiled_graph", "given[0]()")(failing_at("_ops.py")), True),
        (failing_at("nn/functional.py"), False),
        (own_mistake, False),
        (wrapped_compiler, True),
        (endless, False),
    ],
)
def test_a_failure_is_the_compilers_where_its_code_is_the_last(work, expected):
    with pytest.raises(Exception) as caught:
        work()

    assert failures.is_of_compiler(caught.value) is expected


def test_the_compilers_own_errors_are_its_own():
    assert failures.is_of_compiler(torch._dynamo.exc.Unsupported("x"))
    assert not failures.is_of_compiler(ValueError("x"))


def suspected(work, stand_ins=()):
    """What is suspected of the failure of `work` in a session."""
    with running():
        try:
            work()
        except (Exception, SystemExit) as error:
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
    assert read in suspected(lambda: take_first([], SystemExit("the loss is 1.0")), [read])
    assert read in suspected(lambda: take_first([], RuntimeError("diverged")), [read])
    assert suspected(lambda: take_first([]), [elsewhere]) == ""
    # What was read is only shown.
    assert suspected(lambda: take_first([]), [shown]) == ""
    # An error that no value is the reason of.
    assert suspected(lambda: take_first([], OSError("disk")), [read]) == ""


def split_in(sizes):
    count = sizes
    text = "no size"
    print(text)
    return torch.ones(3).split([count, count])


def test_sizes_that_stand_in_are_suspected_where_an_operator_refuses_them():
    name, first = SourceNames().short(__file__), line_of(split_in)

    assert f"{name}:{first}" in suspected(lambda: split_in(5), [f"{name}:{first}"])
    # What decides no size isn't.
    assert suspected(lambda: split_in(5), [f"{name}:{first + 1}"]) == ""


def test_an_error_in_our_own_code_is_suspected(monkeypatch):
    monkeypatch.setattr("memfit.frameworks.torch.simulation.device_view._carry", None)
    assert "memfit's own code" in suspected(lambda: matrix(2).to("meta"))


def test_advice_for_a_single_step_is_not_given_to_a_script():
    with running(), pytest.raises(RuntimeError) as caught:
        matrix(2) + torch.rand(2)
    assert "class weights" not in failures.one_line(caught.value)
    with pytest.raises(StepFailed, match="class weights"):
        run(nn.Linear(10, 2), DATA, loss=lambda model, batch: (model(batch) + torch.rand(4, 2)).sum())


# In each, values are read at lines marked R; what happens at those marked Y may depend on them, at those marked N not.
PROGRAMS = {
    "a loop that shows its loss": """
config = {}
losses = []
for batch in loader:
    loss = model(batch)
    print(loss.item())  # R
    losses.append(loss.item())  # R
    config["missing"]  # N
    loss.backward()  # N
    mean = sum(losses) / len(losses)  # Y
    assert mean < 1  # Y
int("x")  # N
""",
    "what decides": """
count = int(mask.sum().item())  # R
if count == 0:
    kept = []
    raise ValueError("nothing")  # Y
else:
    kept = [1]
kept[0]  # Y
other = {}
other["x"]  # N
for i in range(count):
    other["y"]  # Y
""",
    "a loop that is left": """
ids = []
while True:
    token = head(x)
    if token.item() == end:  # R
        break
    ids.append(1)
ids[-1]  # Y
names[-1]  # N
""",
    "functions, parameters and attributes": """
class Trainer:
    def log(self, step, value):
        self.best = value
        names[step]  # N
    def read(self, x):
        return x.tolist()  # R
    def check(self):
        assert self.best  # Y
class Other:
    def log(self, step, value):
        names[step]  # N
        assert value  # Y
def first(values, value):
    assert value  # N
    return values[0]  # Y
value = 3
trainer.log(step, value=x.item())  # R
first(trainer.read(x), 2)  # Y
values[0]  # N
assert value  # N
""",
    "in the very statement": """
y = table[
    x.item()  # R
]  # Y
with open(path) as file:
    try:
        size = y
    except KeyError:
        rows = size  # Y
        rows[0]  # Y
    data = file.read()
    data[0]  # N
y += 1  # Y
""",
}


def lines(text, mark):
    return [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(f"# {mark}")]


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_value_may_decide(name):
    text = PROGRAMS[name]
    reached = {line for mark in "YN" for line in lines(text, mark) if may_reach(text, lines(text, "R"), [line])}

    assert sorted(reached) == lines(text, "Y")


def test_what_cannot_be_read_may_decide_anything():
    assert may_reach("not python at all", [1], [1])
    assert may_reach("", [1], [1])
    assert may_reach("x = 1", [1], [7])


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("No module named 'flash_attn'", "torch.nn.attention.varlen"),
        ("FlashAttention2 has been toggled on, but the package flash_attn seems to be not installed", "'sdpa'"),
        ("No module named 'triton'", "pip install triton"),
        ("No module named 'liger_kernel'", "pip install liger-kernel"),
        ("0 active drivers ([]). There should only be one.", "in the step alone"),
    ],
)
def test_kernels_that_need_a_gpu_come_with_what_to_do_instead(text, advice):
    assert advice in failures.one_line(ImportError(text))
