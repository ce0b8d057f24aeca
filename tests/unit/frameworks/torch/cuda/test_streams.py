import threading

import pytest
import torch

import memfit
from memfit.core.units import MIB
from memfit.frameworks.torch.cuda.streams import GRAPH_AS_EAGER
from tests.unit.frameworks.torch.machines import machine


def test_a_stream_is_current_for_as_long_as_it_is_chosen():
    with machine():
        stream = torch.cuda.Stream()
        assert torch.cuda.current_stream() == torch.cuda.default_stream() != stream
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() == stream
            assert torch.accelerator.current_stream() == stream
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        with stream:
            assert torch.cuda.current_stream() == stream
        with torch.cuda.stream(None), torch.cuda.StreamContext(None):
            assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.cuda.set_stream(stream)
        assert torch.cuda.current_stream() == stream
        torch.accelerator.set_stream(torch.cuda.default_stream())
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_streams_belong_to_devices():
    with machine(count=2):
        stream = torch.cuda.Stream(device="cuda:1", priority=-1)
        assert (stream.device, stream.device_index, stream.priority) == (torch.device("cuda:1"), 1, -1)
        with stream:
            assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 0
        assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1)
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream(1) == stream
            assert torch.cuda.current_stream(0) == torch.cuda.default_stream(0)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.Stream(2)


def test_streams_wait_for_nothing():
    with machine():
        stream, other = torch.cuda.Stream(), torch.cuda.Stream()
        event = stream.record_event()
        other.wait_event(event)
        other.wait_stream(stream)
        stream.synchronize()
        event.synchronize()
        event.wait()
        assert stream.query()
        assert event.query()
        assert torch.zeros(2).record_stream(stream) is None
        assert stream.priority_range() == (0, -5)
        assert not stream.is_capturing()


def test_streams_can_be_compared_and_shown():
    with machine():
        stream, other = torch.cuda.Stream(), torch.cuda.Stream()

        assert len({stream, other, torch.cuda.Stream(stream_id=stream.stream_id, device_index=0)}) == 2
        assert stream != "stream"
        assert repr(stream) == f"<torch.cuda.Stream device=cuda:0 cuda_stream={stream.cuda_stream:#x}>"
        assert stream.__cuda_stream__() == (0, stream.cuda_stream)
        assert torch.cuda.ExternalStream(0x1234).cuda_stream == 0x1234
        assert torch.cuda.get_stream_from_external(0x1234) == torch.cuda.ExternalStream(0x1234, device=0)


def test_the_general_classes_make_and_recognise_both():
    with machine():
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        assert isinstance(stream, torch.cuda.Stream)
        assert isinstance(stream, torch.Stream)
        assert isinstance(event, torch.Event)
        for made in (torch.Stream(), torch.Stream(0), torch.Stream("cuda"), torch.Stream(device="cuda:0")):
            assert isinstance(made, torch.cuda.Stream)
        assert torch.Event(device="cuda:0", enable_timing=True).device == torch.device("cuda:0")
        host = torch.Stream(device="cpu")
        assert isinstance(host, torch.Stream)
        assert not isinstance(host, torch.cuda.Stream)
        assert issubclass(torch.cuda.Stream, torch.Stream)
        assert not isinstance("stream", torch.Stream)


def test_any_two_events_are_a_millisecond_apart():
    with machine():
        start, end = torch.cuda.Event(enable_timing=True), torch.Event(enable_timing=True)
        assert repr(start) == "<torch.cuda.Event uninitialized>"
        with pytest.raises(ValueError, match="must be recorded"):
            start.elapsed_time(end)
        start.record()
        end.record(torch.cuda.current_stream())
        assert start.elapsed_time(end) == 1.0
        assert repr(start) == f"<torch.cuda.Event {start.cuda_event:#x}>"
        with pytest.raises(ValueError, match="enable_timing=True"):
            start.elapsed_time(torch.cuda.Event())
        with pytest.raises(RuntimeError, match="can't be shared"):
            start.ipc_handle()


def test_each_thread_has_its_own_current_stream():
    seen = []

    with machine(), torch.cuda.stream(torch.cuda.Stream()):
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream().stream_id))
        thread.start()
        thread.join()

    assert seen == [0]


def test_a_graph_runs_what_it_captures_and_says_so():
    with machine() as found:
        ran = []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream()):
            ran.append("once")
        graph.replay()
        graph.reset()
        graph.instantiate()
        graph.enable_debug_mode()
        graph.debug_dump("nowhere")

        assert ran == ["once"]
        assert graph.pool() != torch.cuda.CUDAGraph().pool()
        assert not torch.cuda.is_current_stream_capturing()
    assert [code for code, _ in found.notes] == [GRAPH_AS_EAGER]


def test_graphed_callables_are_the_callables():
    with machine() as found:
        model = torch.nn.Linear(2, 2)

        assert torch.cuda.make_graphed_callables(model, (torch.zeros(1, 2),)) is model
    assert [code for code, _ in found.notes] == [GRAPH_AS_EAGER]


def test_the_general_graph_is_a_context():
    with machine() as found, torch.accelerator.Graph():
        pass

    assert [code for code, _ in found.notes] == [GRAPH_AS_EAGER]


def test_nothing_of_it_is_left():
    before = torch.cuda.Stream, torch.Stream, torch.cuda.graphs.graph.default_capture_stream

    with machine(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass

    assert (torch.cuda.Stream, torch.Stream, torch.cuda.graphs.graph.default_capture_stream) == before
    assert torch.nn.parallel._functions._streams is None
    with pytest.raises(RuntimeError, match="requires CUDA support"):
        torch.cuda.Stream()


def test_what_a_stream_has_freed_serves_no_other():
    with memfit.simulate("24GiB") as device:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 40 * MIB
        # The default stream takes memory of its own; the other one its own again.
        torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 80 * MIB
        with torch.cuda.stream(side):
            torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 80 * MIB

    assert [block.stream for block in device.estimate().timeline.blocks] == [side.stream_id, 0, side.stream_id]


def test_streams_come_in_turn_from_a_pool_for_each_priority():
    with machine():
        streams = [torch.cuda.Stream() for _ in range(33)]
        urgent = torch.cuda.Stream(priority=-1)

    assert len(set(streams)) == 32
    assert streams[0] == streams[32]
    assert urgent not in streams
