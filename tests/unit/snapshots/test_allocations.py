from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.snapshots.allocations import Allocation, real_allocations, simulated_allocations

INSTALLED = "/opt/venv/lib/python3.12/site-packages/"


def frame(name, filename="??", line=0):
    return {"name": name, "filename": filename, "line": line}


def only(frames, ops=(), saved=None):
    events = [{"action": "alloc", "addr": 512, "size": 100, "stream": 0, "frames": frames}]
    snapshot = saved({"segments": [], "device_traces": [events]})
    [one] = real_allocations(snapshot.history(), ops)
    return one


def test_the_operator_is_the_innermost_that_does_not_merely_make_room(saved):
    frames = [
        frame("at::_ops::empty_like::call(at::Tensor const&)"),
        frame("at::_ops::add_Tensor::redispatch(c10::DispatchKeySet, at::Tensor const&)"),
        frame("at::_ops::rsub_Scalar::call(at::Tensor const&)"),
    ]

    # An overload is known by the operators of the simulation.
    assert only(frames, {"aten.add", "aten.ad"}, saved).op == "aten.add"
    assert only(frames, (), saved).op == "aten.add_Tensor"


def test_what_asks_inside_of_an_operator_is_named(saved):
    frames = [
        frame("c10::cuda::CUDACachingAllocator::raw_alloc(unsigned long)"),
        frame("void at::native::gpu_reduce_kernel<float, 4>(at::TensorIterator&)"),
        frame("at::_ops::sum_dim_IntList::call(at::Tensor const&)"),
    ]

    assert only(frames, {"aten.sum"}, saved).function == "at::native::gpu_reduce_kernel"


def test_backward_nodes_stand_in_for_lines(saved):
    frames = [
        frame("at::_ops::bmm::call(at::Tensor const&)"),
        frame("torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor>&&)"),
        frame("torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)"),
    ]
    gradient = [frame("torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)")]

    assert (only(frames, (), saved).source, only(frames, (), saved).place) == ("", "BmmBackward0")
    assert only(gradient, (), saved).place == "AccumulateGrad"


def test_lines_are_those_outside_of_torch_from_the_script_on(saved):
    inside = [
        frame("forward", f"{INSTALLED}torch/nn/modules/linear.py", 3),
        frame("inner", "/usr/lib/python3.12/x.py", 1),
    ]
    main = frame("<module>", "/work/run/train.py", 9)

    assert only([*inside, frame("f", "/work/run/model/net.py", 4), main], (), saved).source == "model/net.py:4"
    assert only([*inside, frame("f", "/elsewhere/net.py", 4), main], (), saved).source == "net.py:4"
    assert only([*inside, frame("f", f"{INSTALLED}einops/x.py", 5), main], (), saved).source == "einops/x.py:5"
    assert only([frame("forward", f"{INSTALLED}torch/nn/modules/linear.py", 3)], (), saved).source == ""


def test_frames_of_any_shape_are_borne(saved):
    for frames in ([1, None], "text", [{"name": 3, "filename": None}], [{}]):
        assert only(frames, (), saved) == Allocation(100, 0, None)


def test_ends_are_those_of_the_same_address(saved):
    events = [
        {"action": action, "addr": address, "size": 100, "stream": 0}
        for action, address in [("alloc", 512), ("free_requested", 512), ("free_completed", 512), ("alloc", 512)]
    ]
    history = saved({"segments": [], "device_traces": [events]}).history()

    assert [(one.start, one.end) for one in real_allocations(history)] == [(0, 1), (3, None)]


def test_simulated_ones_come_in_order():
    blocks = [
        Block(20, 2, None, Category.TEMPORARY, Phase.FORWARD, "net", "aten.add", "net.py:3"),
        Block(10, 0, 1, Category.TEMPORARY, Phase.FORWARD),
    ]

    assert simulated_allocations(Timeline(tuple(blocks), 3)) == [
        Allocation(10, 0, 1),
        Allocation(20, 2, None, "aten.add", "net.py:3", "net"),
    ]
