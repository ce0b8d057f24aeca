import threading

import pytest
import torch
from torch import nn

from memfit.adapters.torch import fallbacks, interception
from memfit.adapters.torch.origin import OriginTracker
from memfit.adapters.torch.recorder import Recorder
from memfit.adapters.torch.replacement import Replacement
from memfit.adapters.torch.simulation import Notes, Simulation, eager
from memfit.core.estimate import Note
from memfit.core.timeline import Category
from tests.unit.adapters.torch.builders import AMPERE, HOST, line_of
from tests.unit.adapters.torch.sessions import really


def make(device=AMPERE, **options):
    origin = OriginTracker()
    return Simulation(device, Recorder(origin.current), origin, **options)


def ops(simulation):
    recorder = simulation.operators._recorder
    return [(block.op, block.size_bytes) for block in recorder.timeline().blocks]


@pytest.fixture
def simulation():
    return make()


def test_while_it_runs_tensors_of_the_device_are_shapes_and_recorded(simulation):
    with simulation.running():
        tensor = torch.zeros(4, device="cuda")
        assert tensor.is_cuda
        assert really(tensor) == "meta"

    assert ops(simulation) == [("aten.zeros", 16)]


def test_a_model_that_asks_for_the_capability_of_its_device_is_told(simulation):
    plain = torch.cuda.get_device_capability
    with simulation.running():
        weight = torch.zeros(4, device="cuda")
        assert torch.cuda.get_device_capability(weight.device) == AMPERE.capability
        assert torch.cuda.get_device_capability() == AMPERE.capability
    assert torch.cuda.get_device_capability is plain

    with make(HOST).running():
        assert torch.cuda.get_device_capability is plain


def test_on_the_host_as_well():
    simulation = make(HOST)
    with simulation.running():
        tensor = torch.zeros(4)
        assert tensor.is_cpu
        assert really(tensor) == "meta"

    assert ops(simulation) == [("aten.zeros", 16)]


def test_afterwards_pytorch_is_itself(simulation):
    with pytest.raises(KeyError), simulation.running():
        raise KeyError

    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.zeros(2).is_meta
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_further_functions_are_replaced_while_it_lasts(simulation):
    plain = torch.cuda.is_available
    with simulation.running([Replacement(torch.cuda, "is_available", lambda: "said so")]):
        assert torch.cuda.is_available() == "said so"

    assert torch.cuda.is_available is plain


def test_other_threads_see_it_only_when_they_enter_it(simulation):
    seen = []

    def outside():
        seen.append(really(torch.zeros(2).relu()))
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(2, device="cuda")

    def inside():
        with simulation.in_thread():
            # Dropout keeps its mask as CUDA does only where the interceptors are met.
            data = torch.zeros(8, device="cuda", requires_grad=True)
            kept = nn.functional.dropout(data, 0.5)
            seen.append((data.is_cuda, really(data), kept.grad_fn.name()))
        seen.append(torch._C._len_torch_dispatch_stack())

    with simulation.running():
        for work in (outside, inside):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

    assert seen == ["cpu", (True, "meta", "NativeDropoutBackward0"), 0]
    assert ("aten.native_dropout", 32) in ops(simulation)


def test_interception_is_on_inside_and_off_afterwards(simulation):
    with simulation.running():
        assert torch._C._dispatch_tls_is_dispatch_key_included(interception._KEY)

    assert not torch._C._dispatch_tls_is_dispatch_key_included(interception._KEY)


@pytest.mark.parametrize("scripted", [False, True])
def test_a_script_has_chosen_the_host_a_step_may_have_had_no_choice(scripted):
    simulation = make(scripted=scripted)
    with simulation.running():
        moved = torch.zeros(4, device="cuda").to("cpu")

    assert really(moved) == ("cpu" if scripted or torch.cuda.is_available() else "meta")


@pytest.mark.parametrize("scripted", [False, True])
def test_values_are_followed_in_scripts_alone(scripted):
    simulation = make(scripted=scripted)
    with simulation.running():
        value = torch.tensor([3, 4], device="cuda").sum().item()

    assert value == (7 if scripted else 1)


@pytest.mark.parametrize(("scripted", "category"), [(False, Category.TEMPORARY), (True, Category.BATCH)])
def test_what_a_script_copies_to_the_device_is_a_batch_until_known_better(scripted, category):
    simulation = make(scripted=scripted)
    with simulation.running():
        kept = torch.zeros(4).cuda()

    (block,) = simulation.operators._recorder.timeline().blocks
    assert block.category is category
    assert kept.numel() == 4


def test_autocast_works_without_cuda(simulation):
    with simulation.running(), torch.autocast("cuda", dtype=torch.float16):
        out = torch.zeros(2, 2, device="cuda") @ torch.zeros(2, 2, device="cuda")

    assert out.dtype is torch.float16


def test_code_of_the_users_sees_the_device_in_the_backward_pass(simulation):
    seen = []

    class Watching(torch.autograd.Function):
        @staticmethod
        def forward(ctx, data):
            return data.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(gradient.is_cuda)
            return gradient

    with simulation.running():
        data = torch.zeros(4, device="cuda", requires_grad=True)
        data.register_hook(lambda gradient: seen.append(gradient.device.type))
        Watching.apply(data).sum().backward()

    assert seen == [True, "cuda"]


def test_hooks_on_saved_tensors_see_the_device(simulation):
    seen = []

    def pack(tensor):
        seen.append(tensor.device.type)
        return tensor.to("cpu")

    def unpack(tensor):
        seen.append(tensor.device.type)
        return tensor.to("cuda")

    simulation = make(scripted=True)
    with simulation.running():
        data = torch.zeros(4, device="cuda", requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = data.exp().sum()
        out.backward()
        gradient = data.grad.is_cuda

    assert seen == ["cuda", "cpu"]
    assert gradient


def test_optimizers_group_tensors_by_the_device_shown(simulation):
    with simulation.running():
        groups = torch._C._group_tensors_by_device_and_dtype([[torch.zeros(2, device="cuda")]], False)

    assert [device for device, _ in groups] == [torch.device("cuda", 0)]


def test_a_parameter_may_change_its_device_and_stay_the_same_object(simulation):
    with simulation.running():
        layer = nn.Linear(2, 2)
        weight = layer.weight
        layer.to("cuda")

        assert layer.weight is weight
        assert weight.is_cuda
        assert isinstance(weight, nn.Parameter)


def report_here(notes, code="code", text="text"):
    notes.report(code, text)


def test_an_assumption_is_noted_once_per_line():
    notes = Notes(OriginTracker())
    for _ in range(3):
        report_here(notes)
    report_here(notes, text="another")
    notes.report("code", "text")

    line = line_of(report_here)
    sources = [note.source.rpartition(":")[2] for note in notes.found.values()]
    assert [note.text for note in notes.found.values()] == ["text", "another", "text"]
    assert sources[:2] == [str(line), str(line)]
    assert sources[2] != str(line)


def test_there_is_an_end_to_notes():
    notes = Notes(OriginTracker())
    for number in range(100):
        notes.report("code", str(number))

    assert [note.text for note in notes.found.values()] == [str(number) for number in range(50)]


class Nowhere(OriginTracker):
    """No line of the user's is running."""

    def current(self):
        return "", ""


def test_a_value_that_only_the_framework_reads_is_no_news():
    notes = Notes(Nowhere())
    notes.report(fallbacks.STAND_IN, "a step counter")
    notes.report(fallbacks.DATA_DEPENDENT, "a shape")

    assert list(notes.found.values()) == [Note(fallbacks.DATA_DEPENDENT, "a shape", "")]


def test_compilation_is_off_inside_and_as_it_was_afterwards():
    import torch._dynamo

    before = torch._dynamo.config.disable
    with pytest.raises(KeyError), eager():
        assert torch._dynamo.config.disable
        raise KeyError

    assert torch._dynamo.config.disable is before
