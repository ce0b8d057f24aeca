"""Writes docs/reference/devices.md from the catalogue: `python scripts/generate_device_docs.py`.

A table kept by hand would drift from what the package computes with; a test compares the two.
"""

from pathlib import Path

from memfit.catalogue.rows import DeviceRow, read_rows
from memfit.core.device import Kind
from memfit.core.units import format_size

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "devices.md"
_DTYPES = ("float32", "tf32", "float16", "bfloat16", "float8")

_HEAD = """\
# Devices

Written by `python scripts/generate_device_docs.py`; don't edit by hand.

`--device` and `device=` take any of these names in any spelling ("RTX 3090", "rtx3090", "NVIDIA GeForce RTX 3090"),
a size ("24GiB", "24GB"), or "cpu".

- A name with several variants means the first of them in the table: `a100` is the 40 GB card, `v100` the 16 GB one,
  `h100` the 80 GB SXM module, `3080` the 10 GB and `4060 ti` the 8 GB card. Add the memory for the others:
  `a100-80gb`. An `a10` is not an `a10g`.
- A bare size is a CUDA device with that much usable memory, compute capability 8.6 and the context of an RTX 3090.
  "GiB" is binary and "GB" decimal, as everywhere in memfit.
- "cpu" is this machine: the limit of its control group where there is one, else its physical memory.
- Apple chips share the machine's memory. On a Mac the bare name takes that machine's; elsewhere add it,
  `m3-max-64gb`, or it is unknown. The system and other programs live in the same memory.

## Where the figures come from

*Nominal* is what the box says. *Usable* is the capacity that PyTorch reports for the card on Linux, before the CUDA
context: the driver, and ECC where it is on, take their share first. **Measured** means that PyTorch itself printed the
figure for that card, in an error message, a training log or its device properties; where no link is given, the
line was found by its text in a public repository whose name isn't known. Drivers differ by up to 3% (newer ones
keep more), and the source gives the spread that was seen. **Assumed** figures say what they are derived from. Windows
reports nearly the nominal size, but lets other programs take from it.

*Context* is what the CUDA context takes in each process. Measured:

{measured}

The others are assumed from these, at 21 MiB and 2.85 MiB per multiprocessor (3.8 MiB where one holds 2048 threads).
A process that uses many kernels, or NCCL, takes more.

Bandwidth and rates are the makers' published peaks, dense, and nobody reaches them. Tensor-core rates are those with
float32 accumulation, which PyTorch uses and at which GeForce cards run half as fast as with float16. The date is when
the evidence for the usable memory was read. The float16 rates of T4, P100, V100, A10, A40, A100, L4, L40S, H100 and
H200 were checked that day against public tables of datasheet figures; the other rates were not checked again.
"""


def render_document() -> str:
    """The whole page, in Markdown."""
    rows = read_rows()
    cuda = [row for row in rows if row.device.kind is Kind.CUDA]
    host = [row for row in rows if row.device.kind is Kind.HOST]
    measured = [
        f"- {row.device.title}: {format_size(row.device.context_bytes)} ({row.context_source})"
        for row in cuda
        if row.context_source
    ]
    return "\n".join(
        [
            _HEAD.format(measured="\n".join(measured)),
            "## CUDA devices: memory\n",
            _table(
                ["name", "device", "nominal", "usable", "", "context", "", "source", "date"],
                [_memory_cells(row) for row in cuda],
            ),
            "## CUDA devices: rates\n",
            _table(
                ["name", "capability", "multiprocessors", "GB/s", *(f"{dtype} TFLOPS" for dtype in _DTYPES)],
                [_rate_cells(row) for row in cuda],
            ),
            "## Devices in the host's memory\n",
            _table(["name", "device", "GB/s", "float32 TFLOPS", "source", "date"], [_host_cells(row) for row in host]),
        ]
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _memory_cells(row: DeviceRow) -> list[str]:
    device = row.device
    return [
        f"`{device.name}`",
        device.title,
        format_size(device.nominal_bytes),
        format_size(device.usable_bytes),
        device.usable_origin.value,
        format_size(device.context_bytes),
        "measured" if row.context_source else "assumed",
        device.source,
        device.date,
    ]


def _rate_cells(row: DeviceRow) -> list[str]:
    device = row.device
    capability = ".".join(map(str, device.capability or ())) or "unknown"
    counts = [f"`{device.name}`", capability, str(device.num_multiprocessors or "unknown")]
    return [*counts, _number(device.bandwidth_bytes_per_second, 1e9), *(_rate(row, dtype) for dtype in _DTYPES)]


def _host_cells(row: DeviceRow) -> list[str]:
    device = row.device
    bandwidth = _number(device.bandwidth_bytes_per_second, 1e9)
    rate = _number(device.flops.get("float32"), 1e12)
    return [f"`{device.name}`", device.title, bandwidth, rate, device.source, device.date]


def _rate(row: DeviceRow, dtype: str) -> str:
    # Hardware without a dtype is not a gap in our knowledge.
    return _number(row.device.flops[dtype], 1e12) if dtype in row.device.flops else "-"


def _number(value: float | None, unit: float) -> str:
    return "unknown" if value is None else f"{value / unit:g}"


if __name__ == "__main__":
    PAGE.write_text(render_document(), encoding="utf-8")
