import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.catalogue import query
from memfit.catalogue.query import find_device, list_devices
from memfit.catalogue.rows import read_instances, read_rows
from memfit.core.device import Device, Kind, Origin
from memfit.core.errors import InvalidSize, UnknownDevice
from memfit.core.units import GIB

ROWS = read_rows()


def name_of(text):
    return find_device(text).name


def spellings(name):
    yield from (name, name.upper(), name.replace("-", " "), name.replace("-", "_"), f"  {name}  ", f"NVIDIA {name}")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.device.name)
def test_every_device_answers_to_its_names(row):
    for name in (row.device.name, row.device.title, *row.aliases):
        for spelling in spellings(name):
            assert name_of(spelling) == row.device.name


@pytest.mark.parametrize("row", [row for row in ROWS if row.device.nominal_bytes], ids=lambda row: row.device.name)
def test_the_memory_may_always_be_added(row):
    stem = row.device.name.rsplit("-", 1)[0] if row.device.name.endswith("gb") else row.device.name
    for suffix in ("gb", " GB", "GiB"):
        assert name_of(f"{stem}-{row.device.nominal_bytes // GIB}{suffix}") == row.device.name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        # torch.cuda.get_device_name
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("GeForce GTX 1080 Ti", "gtx-1080-ti"),
        ("Tesla T4", "t4"),
        ("Tesla P100-PCIE-16GB", "p100-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla V100-PCIE-16GB", "v100-16gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000-max-q"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("Quadro RTX 8000", "quadro-rtx-8000"),
        # what people type
        ("rtx3090", "rtx-3090"),
        ("3090", "rtx-3090"),
        ("3090ti", "rtx-3090-ti"),
        ("GeForceRTX4090", "rtx-4090"),
        ("A100 80GB", "a100-80gb"),
        ("a100-80 gb", "a100-80gb"),
        ("a6000", "rtx-a6000"),
        ("v100 sxm2", "v100-16gb"),
        # documented defaults
        ("a100", "a100-40gb"),
        ("v100", "v100-16gb"),
        ("h100", "h100-80gb"),
        ("3080", "rtx-3080"),
        ("4060 ti", "rtx-4060-ti"),
        ("RTX 3080 12GB", "rtx-3080-12gb"),
    ],
)
def test_spellings(text, name):
    assert name_of(text) == name


def test_a_bare_size_is_a_generic_device():
    device = find_device("24GiB")
    assert (device.name, device.usable_bytes, device.nominal_bytes) == ("24GiB", 24 * GIB, 24 * GIB)
    assert (device.kind, device.capability, device.usable_origin) == (Kind.CUDA, (8, 6), Origin.ASSUMED)
    assert device.context_bytes == pytest.approx(256 * 2**20, rel=0.01)


@pytest.mark.parametrize(
    ("text", "name", "size_bytes"),
    [(" 24 gb ", "24GB", 24 * 10**9), ("1.5gib", "1.5GiB", 3 * GIB // 2), ("800MiB", "800MiB", 800 * 2**20)],
)
def test_sizes_in_other_spellings(text, name, size_bytes):
    device = find_device(text)
    assert (device.name, device.usable_bytes) == (name, size_bytes)


@pytest.mark.parametrize("text", ["0GiB", "0 GB", "9" * 60 + "GiB", "2048TiB"])
def test_absurd_sizes(text):
    with pytest.raises(InvalidSize):
        find_device(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "   ", "\x00", "💥", "gpu", "NVIDIA", "rtx", "pcie", "cuda:0", "24", "24.5", "24g", "-5GiB"),
        *("rtx 6000", "a100 60gb", "m3-max-0gb", "cpu-64gb", "RTX 3080 Laptop GPU", "A100-SXM4-40GB MIG 1g.10gb"),
    ],
)
def test_unknown_names(text):
    with pytest.raises(UnknownDevice, match=r"Run `memfit devices` for the list, or give a size such as 24GiB\."):
        find_device(text)


def test_the_nearest_names_are_offered():
    with pytest.raises(UnknownDevice) as error:
        find_device("rtx 3091")
    assert str(error.value) == (
        "no device is called 'rtx 3091'. The nearest: rtx-3090, rtx-3090-ti. "
        "Run `memfit devices` for the list, or give a size such as 24GiB."
    )


def test_a_very_long_name_is_not_repeated():
    with pytest.raises(UnknownDevice) as error:
        find_device("x" * 100_000)
    assert "100000 characters" in str(error.value)
    assert len(str(error.value)) < 200


class TestHost:
    def test_the_cpu_has_the_memory_of_this_machine(self, monkeypatch):
        monkeypatch.setattr(query, "host_memory_bytes", lambda: 5 * GIB)
        device = find_device("CPU")
        assert (device.kind, device.usable_bytes, device.usable_origin) == (Kind.HOST, 5 * GIB, Origin.MEASURED)

    def test_a_machine_that_cannot_tell_leaves_it_unknown(self, monkeypatch):
        monkeypatch.setattr(query, "host_memory_bytes", lambda: None)
        assert find_device("cpu").usable_bytes is None

    def test_an_apple_chip_with_its_memory(self):
        device = find_device("Apple M3 Max 64 GB")
        assert (device.name, device.kind) == ("m3-max-64gb", Kind.HOST)
        assert (device.usable_bytes, device.usable_origin) == (64 * GIB, Origin.ASSUMED)

    def test_an_apple_chip_elsewhere_has_unknown_memory(self, monkeypatch):
        monkeypatch.setattr(query.sys, "platform", "linux")
        assert find_device("m3-max").usable_bytes is None

    def test_an_apple_chip_on_a_mac_has_that_machines_memory(self, monkeypatch):
        monkeypatch.setattr(query.sys, "platform", "darwin")
        monkeypatch.setattr(query, "host_memory_bytes", lambda: 36 * GIB)
        assert find_device("m3-max").usable_bytes == 36 * GIB


def test_the_list_holds_every_row_once():
    devices = list_devices()
    assert len(devices) == len(ROWS) == len({device.name for device in devices})
    assert {"cpu", "t4", "rtx-3090", "a100-40gb", "b200", "m1"} <= {device.name for device in devices}


PIECES = ["nvidia", "geforce", "rtx", "a100", "h100", "3090", "40gb", "24GiB", "pcie", "sxm4", "ti", "m3", "max", "cpu"]
NAMES = st.lists(st.sampled_from([*PIECES, "0", "-", " ", "GB", "9" * 30]), max_size=8).map("".join)


@given(st.text() | st.text("0123456789.gGiIbBkKmMtT \t-") | NAMES)
def test_any_text_is_a_device_or_a_clear_error(text):
    try:
        device = find_device(text)
    except (UnknownDevice, InvalidSize) as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(device, Device)
        assert device.usable_bytes is None or device.usable_bytes > 0


@pytest.mark.parametrize(("family", "name"), read_instances().items())
def test_an_instance_of_aws_names_its_device(family, name):
    for text in (f"{family}.xlarge", f"ml.{family}.48xlarge", f" {family.upper()}.2XLARGE "):
        assert name_of(text) == name


def test_families_with_parts_of_a_device_or_others_are_not_guessed():
    for text in ("g6f.xlarge", "trn1.2xlarge", "g5.huge"):
        with pytest.raises(UnknownDevice, match="no device is called"):
            find_device(text)
