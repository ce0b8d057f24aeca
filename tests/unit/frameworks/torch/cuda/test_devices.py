import os
import threading
from dataclasses import replace

import pytest
import torch
from torch.cuda import device_count as device_count_imported_before
from torch.cuda import is_available as is_available_imported_before

from memfit.frameworks.torch.cuda.devices import CudaDevices
from tests.unit.frameworks.torch.machines import T4, machine


def test_pytorch_finds_the_device():
    with machine():
        assert torch.cuda.is_available()
        assert torch.cuda.is_initialized()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.current_device() == 0
        assert torch.cuda.get_device_name() == torch.cuda.get_device_name("cuda:0") == "NVIDIA Tesla T4"
        assert torch.cuda.get_device_capability(torch.device("cuda")) == (7, 5)
        assert torch.backends.cuda.is_built()
        assert torch.get_device_module() is torch.cuda
        torch.cuda.init()
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()


def test_functions_imported_before_find_it_too():
    with machine(count=2):
        assert is_available_imported_before()
        assert device_count_imported_before() == 2


def test_afterwards_nothing_is_found():
    names = set(vars(torch._C))
    functions = {name: value for name, value in vars(torch.cuda).items() if not name.startswith("__")}

    with machine():
        torch.cuda.device_count()

    assert not torch.cuda.is_available()
    assert not torch.accelerator.is_available()
    assert torch.version.cuda is None
    assert set(vars(torch._C)) == names
    assert {name: value for name, value in vars(torch.cuda).items() if not name.startswith("__")} == functions
    with pytest.raises(AssertionError, match="not compiled with CUDA"):
        torch.cuda.init()


def test_properties_are_those_of_the_catalogue():
    with machine():
        properties = torch.cuda.get_device_properties(0)

    assert (properties.major, properties.minor) == (7, 5)
    assert properties.total_memory == T4.usable_bytes
    assert properties.multi_processor_count == 40
    assert properties.max_threads_per_multi_processor == 1024
    assert properties.warp_size == 32
    assert properties.shared_memory_per_block_optin == properties.shared_memory_per_multiprocessor == 65536
    assert repr(properties).startswith(
        "_CudaDeviceProperties(name='NVIDIA Tesla T4', major=7, minor=5, total_memory=15000MB, "
        "multi_processor_count=40, uuid="
    )


PROPERTIES = """
    L2_cache_size regs_per_multiprocessor shared_memory_per_block gcnArchName uuid is_integrated is_multi_gpu_board
    clock_rate memory_clock_rate memory_bus_width max_threads_per_block
"""


@pytest.mark.parametrize("name", PROPERTIES.split())
def test_every_property_is_there(name):
    with machine():
        assert hasattr(torch.cuda.get_device_properties(), name)


def test_a_device_of_which_nothing_is_known():
    unknown = replace(T4, usable_bytes=None, capability=None, num_multiprocessors=None)

    with machine(unknown):
        properties = torch.cuda.get_device_properties("cuda")

        assert properties.total_memory == 2**40
        assert torch.cuda.get_device_capability() == (8, 0)
        assert properties.multi_processor_count > 0


@pytest.mark.parametrize(
    ("capability", "version", "architecture"), [((6, 0), "12.6", "sm_60"), ((7, 5), "13.0", "sm_75")]
)
def test_the_build_has_code_for_the_device(capability, version, architecture):
    with machine(replace(T4, capability=capability)):
        assert torch.version.cuda == version
        assert architecture in torch.cuda.get_arch_list()
        assert torch.cuda.get_gencode_flags().startswith("-gencode compute=compute_")


@pytest.mark.parametrize(("capability", "native"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_bfloat16_is_emulated_before_ampere(capability, native):
    with machine(replace(T4, capability=capability)):
        assert torch.cuda.is_bf16_supported()
        assert torch.cuda.is_bf16_supported(including_emulation=False) is native
        assert torch.cuda.is_tf32_supported() is native


def test_the_current_device_can_be_changed():
    with machine(count=3):
        torch.cuda.set_device("cuda:1")
        assert torch.cuda.current_device() == torch.accelerator.current_device_index() == 1
        with torch.cuda.device(2):
            assert torch.cuda.current_device() == 2
            with torch.cuda.device(None), torch.cuda.device(-1):
                assert torch.cuda.current_device() == 2
        assert torch.cuda.current_device() == 1
        torch.accelerator.set_device_index(0)
        with torch.accelerator.device_index(2):
            assert torch.cuda.current_device() == 2
        assert torch.cuda.current_device() == 0


def test_each_thread_has_its_own_current_device():
    seen = []

    with machine(count=2):
        torch.cuda.set_device(1)
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
        thread.start()
        thread.join()
        assert torch.cuda.current_device() == 1

    assert seen == [0]


def test_a_host_tensor_has_no_cuda_device():
    with machine(count=2), torch.cuda.device_of(torch.zeros(1)):
        assert torch.cuda.current_device() == 0


def test_peers_can_reach_each_other():
    with machine(count=2):
        assert torch.cuda.can_device_access_peer(0, 1)


@pytest.mark.parametrize("ask", [torch.cuda.set_device, torch.accelerator.set_device_index])
def test_a_device_that_is_not_there(ask):
    with machine(count=2), pytest.raises(RuntimeError, match="invalid device ordinal") as raised:
        ask(5)

    assert str(raised.value) == (
        "CUDA error: invalid device ordinal\n"
        "Device 5 was asked for, but 2 devices are simulated. Use --count 6 for more."
    )


def test_the_properties_of_a_device_that_is_not_there():
    with machine(), pytest.raises(AssertionError, match=r"Invalid device id.*1 device is simulated.*--count 2"):
        torch.cuda.get_device_properties(1)


def test_a_program_may_hide_devices(monkeypatch):
    with machine(count=4):
        for text, count in (("2,3", 2), ("0,1,2,3,4,5", 4), ("1,-1,2", 1), ("-1", 0), ("", 0), ("GPU-1234", 1)):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
            assert torch.cuda.device_count() == count
            assert torch.cuda.is_available() is (count > 0)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert torch.cuda.device_count() == 4


def test_what_hid_them_before_means_nothing(monkeypatch):
    # GIVEN a machine on which devices are hidden from every program
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    with machine(count=2):
        assert torch.cuda.device_count() == 2


def test_the_accelerator_is_cuda():
    with machine():
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.accelerator.current_accelerator(check_available=True) == torch.device("cuda")
        assert torch.accelerator.is_available()
        assert torch.accelerator.device_count() == 1
        torch.accelerator.synchronize()
        assert torch.float16 in torch.accelerator.get_device_capability()["supported_dtypes"]


def test_cuda_cannot_be_used_in_a_forked_process(monkeypatch):
    with machine():
        monkeypatch.setattr(os, "getpid", lambda: -1)

        assert torch.cuda.is_available()
        assert not torch.cuda.is_initialized()
        with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
            torch.cuda.init()


def test_calls_that_wait_for_cuda_are_made_at_once():
    calls = []

    with machine():
        torch.cuda._lazy_call(lambda: calls.append("now"))

    assert calls == ["now"]


def test_negative_indices_change_nothing():
    devices = CudaDevices(T4, 2)
    devices.select(1)

    assert devices.exchange(-1) == -1
    assert devices.exchange(0) == 1
    assert devices.current == 0
