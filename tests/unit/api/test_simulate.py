"""A device for a few lines of a notebook."""

import os
import threading

import pytest
import torch
from torch import nn

import memfit
from memfit import BadInput, SimulatedDevice, find_device
from memfit.core.timeline import Category
from memfit.core.units import GIB, MIB


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


def train(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 100, device="cuda")).sum().backward()
        optimizer.step()


def test_a_device_is_there_while_it_lasts():
    before = torch.cuda.is_available(), torch.cuda.device_count()
    with memfit.simulate("t4") as device:
        assert isinstance(device, SimulatedDevice)
        assert (torch.cuda.is_available(), torch.cuda.device_count()) == (True, 1)
        assert torch.cuda.get_device_name() == "NVIDIA Tesla T4"
        assert torch.zeros(3, device="cuda").is_cuda
        assert (device.name, repr(device)) == ("t4", "<SimulatedDevice t4>")

    assert (torch.cuda.is_available(), torch.cuda.device_count()) == before


def test_models_and_random_numbers_are_afterwards_what_they_were():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    model = nn.Linear(100, 100)
    optimizer = torch.optim.Adam(model.parameters())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    with memfit.simulate("t4"):
        train(model.cuda(), optimizer)

    assert all(torch.equal(value, model.state_dict()[name]) for name, value in values.items())
    assert dict(optimizer.state) == {}
    assert torch.equal(torch.rand(2), expected)


def test_what_has_been_allocated_can_be_asked_for_in_between_and_afterwards():
    with memfit.simulate("t4") as device:
        assert device.estimate().replay.allocated_peak_bytes == 0
        held = torch.zeros(MIB, device="cuda")
        early = device.estimate()
        more = torch.zeros(2 * MIB, device="cuda")
        assert held.shape != more.shape
    late = device.estimate()

    assert early.replay.allocated_peak_bytes == 4 * MIB
    assert late.replay.allocated_peak_bytes == 12 * MIB
    assert late.device.name == "t4"
    assert late.fits
    # It is what was seen by the end, every time.
    assert device.estimate() is late
    assert str(device) == str(late)


def test_where_the_memory_goes():
    with memfit.simulate("t4") as device:
        model = nn.Linear(100, 100).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer)

    timeline = device.estimate().timeline
    sizes = timeline.breakdown(timeline.num_ticks - 1, lambda block: block.category)
    assert sizes[Category.PARAMETER] == 100 * 101 * 4
    assert sizes[Category.OPTIMIZER_STATE] == 2 * 100 * 101 * 4


def test_it_runs_out_of_memory_where_the_device_would():
    with memfit.simulate("1GiB") as device:
        held = torch.zeros(500, MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 GiB"):
            torch.zeros(2 * GIB, dtype=torch.uint8, device="cuda")
        del held

    (failure,) = device.failures
    assert (failure.requested_bytes, failure.allocated_bytes) == (2 * GIB, 500 * MIB)
    assert "test_simulate.py" in failure.source


def test_an_error_of_the_users_own_comes_through_and_the_device_can_still_be_asked():
    with pytest.raises(ZeroDivisionError), memfit.simulate("t4") as device:
        torch.zeros(MIB, device="cuda")
        raise ZeroDivisionError

    assert device.estimate().replay.allocated_peak_bytes == 4 * MIB
    assert not torch.cuda.is_available()
    with memfit.simulate("t4"):
        assert torch.cuda.is_available()


def test_several_devices_of_which_the_first_has_the_memory():
    with memfit.simulate(find_device("t4"), count=2) as device:
        assert torch.cuda.device_count() == 2
        other = torch.zeros(MIB, device="cuda:1")
        assert other.get_device() == 1

    assert device.estimate().replay.allocated_peak_bytes == 0


def test_settings_made_by_the_program_count(monkeypatch):
    # GIVEN segments that grow by pages of 20 MiB, where others are rounded up to 2 MiB
    with memfit.simulate("t4"):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        held = torch.zeros(25, MIB, dtype=torch.uint8, device="cuda")
        reserved = torch.cuda.memory_reserved()
        del held

    assert reserved == 40 * MIB


def test_a_page_of_it(tmp_path):
    with memfit.simulate("t4") as device:
        torch.zeros(MIB, device="cuda")
        device.report(tmp_path / "page.html")

    assert "Tesla T4" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "cpu"}, r"only CUDA devices can be simulated, but 'cpu' was given\. Name one, such as 'rtx-3090'"),
        ({"device": "t4", "count": 0}, "count must be at least 1, but 0 was given"),
        ({"device": "no such device"}, "no such device"),
    ],
    ids=str,
)
def test_what_cannot_be_simulated(given, message):
    with pytest.raises(BadInput, match=message), memfit.simulate(**given):
        pytest.fail("it began")


def test_files_that_were_there_stay_and_reports_are_written(tmp_path, monkeypatch):
    # GIVEN a checkpoint, a log and a report of the user's
    monkeypatch.chdir(tmp_path)
    files = {"model.pt": "the user's", "log.txt": "the user's", "report.html": "<old>"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    # WHEN a program saves, appends and reports
    with memfit.simulate("t4") as device:
        model = nn.Linear(100, 100).cuda()
        torch.save(model.state_dict(), "model.pt")
        model.load_state_dict(torch.load("model.pt"))
        with open("log.txt", "a") as log, open("new.txt", "w") as new:
            log.write(", changed")
            new.write("new")
        assert (tmp_path / "log.txt").read_text() == "the user's, changed"
        device.report("report.html")

    # THEN nothing that was there has changed but the report that was asked for
    assert (tmp_path / "model.pt").read_text() == (tmp_path / "log.txt").read_text() == "the user's"
    assert (tmp_path / "new.txt").read_text() == "new"
    assert len((tmp_path / "report.html").read_text()) > 1000
    assert sorted(os.listdir(tmp_path)) == ["log.txt", "model.pt", "new.txt", "report.html"]
    noted = [note.text for note in device.estimate().notes if note.code == "checkpoint-redirected"]
    assert any(f"{tmp_path}/model.pt was not touched" in text for text in noted)


def test_threads_that_were_there_before_write_their_files(tmp_path):
    # GIVEN a log of the user's, and a thread that waits to write to it
    log, begun, done = tmp_path / "log.txt", threading.Event(), threading.Event()
    log.write_text("1")

    def write():
        begun.wait(60)
        with open(log, "a") as file:
            file.write("2")
        done.set()

    threading.Thread(target=write, daemon=True).start()
    with memfit.simulate("t4"):
        begun.set()
        assert done.wait(60)
        inside = threading.Thread(target=lambda: log.write_text("3"))
        inside.start()
        inside.join()

    assert log.read_text() == "12"
