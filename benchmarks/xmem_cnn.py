"""Predicted against measured reserved memory of torchvision's CNNs on consumer GPUs (xMem's runs).

    python -m benchmarks.xmem_cnn [--csv PATH]

Columns: model, optimizer, batch, gpu, and the measured reserved_peak_bytes (without the CUDA context). All runs are
float32 with images of 86x86, on PyTorch 2.6. The prediction is what `memfit.estimate` says: the allocator is replayed
without a limit first and, when that needs more than the card has, within the card's capacity, where it releases
cached memory and asks again.
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import memfit
from benchmarks import rows
from benchmarks.reporting import Bar, bullets, percent, publish, table
from memfit.core.units import MIB

DEFAULT_CSV = rows.DATA / "xmem_cnn_rtx3060.csv"
IMAGE_SIZE = 86
STACK = "torch2.6"
MEDIAN_LIMIT = 0.02
WORST_LIMIT = 0.08

# What is known about rows that miss; shown when they do, never used in a prediction.
REMARKS = {
    ("mnasnet1_0", "RMSprop"): (
        "unexplained. The measured peak is 0.7 GB above the bytes of all live tensors, while for the same model with "
        "AdamW at nearly twice the batch it is 0.5 GB above them: the difference is not in what grows with the batch, "
        "and the optimizer's state is 18 MB a copy. A cuDNN workspace taken once for one of the convolutions would "
        "have the size; we can't show that it was taken."
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row beside its prediction."""

    row: rows.Row
    name: str
    estimate: memfit.Estimate

    @property
    def measured_bytes(self) -> int:
        """Reserved peak, as measured."""
        return int(self.row["reserved_peak_bytes"])

    @property
    def unlimited_bytes(self) -> int:
        """Reserved peak if the card had no limit."""
        return self.estimate.reserved_peak_bytes

    @property
    def error(self) -> float:
        """Of the reserved peak."""
        return self.estimate.reserved_peak_bytes / self.measured_bytes - 1

    @property
    def interval_bytes(self) -> tuple[int, int]:
        """The 95% interval of the reserved peak: the context wasn't measured."""
        least, most = self.estimate.interval_bytes
        return least - self.estimate.context_bytes, most - self.estimate.context_bytes

    @property
    def is_inside(self) -> bool:
        """Whether the measured peak is within the interval."""
        least, most = self.interval_bytes
        return least <= self.measured_bytes <= most

    @property
    def label(self) -> str:
        """The row in words."""
        return f"{self.row['model']}, {self.row['optimizer']}, {self.row['batch']}, {self.row['gpu']}"


def squeeze(name: str) -> str:
    """A model's name without case and punctuation.

    >>> squeeze("RegNetX400MF") == squeeze("regnet_x_400mf")
    True
    """
    return re.sub(r"[^a-z0-9]", "", name.lower())


def torchvision_name(name: str) -> str:
    """The classifier of torchvision that is meant by a name in any spelling.

    >>> torchvision_name("VGG16"), torchvision_name("MnasNet"), torchvision_name("MobileNetV3Large")
    ('vgg16', 'mnasnet1_0', 'mobilenet_v3_large')
    """
    from torchvision import models  # only now: `rows` has made sure that it can be imported

    known: dict[str, str] = {squeeze(found): found for found in models.list_models(module=models)}
    wanted = squeeze(name)
    # A family named without its width means width 1.0: "mnasnet" is mnasnet1_0, "shufflenetv2" is shufflenet_v2_x1_0.
    for candidate in (wanted, f"{wanted}10", f"{wanted}x10"):
        if candidate in known:
            return known[candidate]
    raise ValueError(f"torchvision has no classifier called {name!r}.")


def predict(row: rows.Row) -> Outcome:
    """A row beside its prediction."""
    name = torchvision_name(row["model"])
    job = memfit.Job(
        model=memfit.named_job(f"torchvision:{name}").model,
        loss=rows.classify,
        batch=rows.images(IMAGE_SIZE),
        optimizer=rows.optimizer_named(row["optimizer"]),
    )
    with rows.quietly():
        device = memfit.find_device(row["gpu"], stack=STACK)
        estimate = memfit.estimate(job, device=device, batch_size=int(row["batch"]))
    return Outcome(row, name, estimate)


def bars(outcomes: list[Outcome]) -> list[Bar]:
    """The claims about these rows."""
    errors = [abs(o.error) for o in outcomes]
    middle, worst = median(errors), max(errors)
    allowed = all(abs(o.error) <= WORST_LIMIT or o.is_inside for o in outcomes)
    each = f"each row within {WORST_LIMIT:.0%} or its interval"
    return [
        Bar("reserved peak, median", f"{middle:.2%}", f"within {MEDIAN_LIMIT:.0%}", middle <= MEDIAN_LIMIT),
        Bar("reserved peak, worst row", f"{worst:.2%}", each, allowed),
    ]


def sections(outcomes: list[Outcome]) -> list[str]:
    """The page's body."""
    headers = (
        "run",
        "measured, MiB",
        "predicted, MiB",
        "error",
        "without a limit",
        "tensor bytes alone",
        "95% interval",
        "runs",
    )
    cells = [
        (
            o.label,
            f"{o.measured_bytes / MIB:,.0f}",
            f"{o.estimate.reserved_peak_bytes / MIB:,.0f}",
            percent(o.error),
            percent(o.unlimited_bytes / o.measured_bytes - 1),
            percent(o.estimate.timeline.peak()[1] / o.measured_bytes - 1),
            " to ".join(f"{size / MIB:,.0f}" for size in o.interval_bytes) + ("" if o.is_inside else ", **outside**"),
            "yes" if o.estimate.fits else "no",
        )
        for o in outcomes
    ]
    mean = f"Mean error without sign: {fmean(abs(o.error) for o in outcomes):.2%}. "
    mean += "Where the first two errors differ, the allocator wanted more than the card had and released its cache."
    misses = [
        f"{o.label}: {percent(o.error)}, {REMARKS.get((o.name, o.row['optimizer']), 'no remark')}"
        for o in outcomes
        if abs(o.error) > WORST_LIMIT
    ]
    return ["## Rows", table(headers, cells), mean, *(["## Misses", bullets(misses)] if misses else [])]


def main() -> None:
    """Score every row and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=DEFAULT_CSV, help="measured rows")
    path: Path = parser.parse_args().csv
    outcomes, skipped = [], []
    for row in rows.read_rows(path):
        try:
            outcomes.append(predict(row))
        except (memfit.MemfitError, ValueError) as error:
            skipped.append(f"{row['model']}, batch {row['batch']}: {str(error).splitlines()[0]}")
    left_out = [f"## Skipped\n\n{bullets(skipped)}"] if skipped else []
    title = "Reserved memory of CNNs on RTX 3060 and RTX 4060"
    publish("xmem_cnn", title, bars(outcomes), [*sections(outcomes), *left_out], save=path == DEFAULT_CSV)


if __name__ == "__main__":
    main()
