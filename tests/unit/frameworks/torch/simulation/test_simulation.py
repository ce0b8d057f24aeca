import gc
import threading

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from memfit.core.estimate import Note
from memfit.core.patching import Replacement
from memfit.core.timeline import Category
from memfit.frameworks.torch.kernels import fallbacks
from memfit.frameworks.torch.shapes import interception
from memfit.frameworks.torch.shapes.origin import OriginTracker
from memfit.frameworks.torch.shapes.recorder import Recorder
from memfit.frameworks.torch.simulation.simulation import (
    Notes,
    Simulation,
    UsualCollector,
)
from tests.unit.frameworks.torch.builders import AMPERE, HOST, line_of
from tests.unit.frameworks.torch.sessions import really, running


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
        torch.autograd.grad(Watching.apply(data).sum(), data)

    assert seen == [True, "cuda"] * 2


def test_hooks_on_saved_tensors_see_the_device():
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


FIRST = torch.device("cuda", 0)


def test_autocast_for_cuda_is_there():
    with make().running():
        assert not torch.cuda.amp.common.amp_definitely_not_available()
        assert torch.cuda.is_bf16_supported()
        # Recurrent layers flatten the weights of those that cuDNN takes.
        assert not torch.backends.cudnn.is_acceptable(torch.zeros(2))


def test_clearing_the_cache_of_autocast_clears_both():
    simulation = make()
    with simulation.running(), torch.autocast("cuda", torch.float16):
        weight = nn.Parameter(torch.empty(3, 3, device="cuda"))
        for _ in range(2):
            weight @ weight
        torch.clear_autocast_cache()
        weight @ weight

    assert [op for op, _ in ops(simulation)].count("aten._to_copy") == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_sees_the_device(reentrant):
    seen = []

    class Watched(nn.Module):
        def forward(self, data):
            seen.append(data.device)
            return data.exp() + torch.ones(4, device=data.device)

    with running():
        data = torch.zeros(4, device="cuda", requires_grad=True)
        checkpoint(Watched(), data, use_reentrant=reentrant).sum().backward()
        assert data.grad.is_cuda

    assert seen == [FIRST, FIRST]


def test_saved_tensors_may_be_kept_on_the_host():
    # GIVEN PyTorch's own hooks, which move what is saved to the host and back
    with running() as session:
        data = torch.zeros(1000, device="cuda", requires_grad=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            out = data.exp()
            kept = out.exp()
        del out
        # Only the last result is on the device, besides the data.
        assert session.memory.allocated_bytes == 2 * 4096
        kept.sum().backward()
        assert data.grad.is_cuda


def test_tensors_are_grouped_by_where_they_are_said_to_be():
    with running(count=2):
        tensors = [torch.zeros(2, device="cuda:0"), torch.zeros(2, device="cuda:1"), torch.zeros(2)]
        groups = torch._C._group_tensors_by_device_and_dtype([tensors], True)

        found = {str(device): indices for (device, _), (_, indices) in groups.items()}
    assert found == {"cuda:0": [0], "cuda:1": [1], "cpu": [2]}


def test_tensors_made_of_others_may_be_said_to_be_on_the_device():
    with running():
        parts = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
        pair = TwoTensor(*parts)

        assert pair.is_cuda
        assert really(pair) == "meta"


def test_a_parameter_may_take_over_a_tensor_of_another_device():
    with make().running():
        assert torch._has_compatible_shallow_copy_type(torch.zeros(2), torch.zeros(2, device="meta"))
        assert torch._has_compatible_shallow_copy_type(torch.zeros(2), torch.zeros(2))
        assert not torch._has_compatible_shallow_copy_type(torch.zeros(2), torch.eye(2).to_sparse())


class Operators:
    """Stands for those of a simulation: what is entered around each operator."""

    around = None


@pytest.fixture
def switched_off():
    gc.disable()
    yield
    gc.enable()


class Node:
    def __init__(self):
        self.me = self
        self.tensor = torch.empty(1)


def made_until_collected(collector, operators, inside):
    """Cycles that were made until the first was collected."""
    seen = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    try:
        with collector.running(operators):
            for number in range(10_000):
                Node()
                with operators.around:
                    kept = [[] for _ in range(inside)]
                if seen:
                    return number
                del kept
    finally:
        gc.callbacks.pop()
    return None


def test_what_an_operator_makes_and_keeps_does_not_count(switched_off):
    alone = made_until_collected(UsualCollector(), Operators(), 0)

    assert alone < 1000
    assert made_until_collected(UsualCollector(), Operators(), 50) == pytest.approx(alone, abs=60)


def test_operators_inside_of_operators_are_one(switched_off):
    collector, operators = UsualCollector(), Operators()

    with collector.running(operators), operators.around:
        with operators.around:
            pass
        assert not gc.isenabled()


def test_the_collector_is_left_as_it_was(switched_off):
    thresholds = gc.get_threshold()
    operators = Operators()

    with pytest.raises(ValueError, match="stop"), UsualCollector().running(operators):
        with operators.around:
            kept = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_threshold()[0] > thresholds[0] + len(kept) // 2
        raise ValueError("stop")

    assert not gc.isenabled()
    assert gc.get_threshold() == thresholds
    with operators.around:
        pass
    assert not gc.isenabled()
