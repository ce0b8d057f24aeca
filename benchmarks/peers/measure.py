"""The count that every reader makes of itself, in the same words.

The clock runs from the request for the first batch, workers' start included, to the end of the epoch or to a limit of
time: slow readers are measured over a part of the epoch, and say so.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


def measure(batches: Iterable[Any], seconds: float, first_column: Callable[[Any], Any]) -> None:
    """Goes through the batches and prints rows, seconds, whether the epoch was finished, and a sum over its rows.

    Args:
        batches: of the epoch.
        seconds: to stop after.
        first_column: of a batch: each row's own number, so that their sum tells whether each came once.
    """
    started = now = time.perf_counter()
    rows, total, is_whole = 0, 0.0, True
    for batch in batches:
        numbers = np.asarray(first_column(batch))
        rows += len(numbers)
        total += float(numbers.sum(dtype=np.float64))
        now = time.perf_counter()
        if now - started > seconds:
            is_whole = False
            break
    answer = {"rows": rows, "seconds": now - started, "is_whole": is_whole, "total": total}
    print(json.dumps(answer), flush=True)


def parse(prepare: Callable[[str, str], None], read: Callable[[str, int, int, float], None]) -> None:
    """Runs one of the two forms of a peer's script.

    Args:
        prepare: from a .npy file to a folder.
        read: a folder, with a size of batches, a number of workers and a limit of seconds.
    """
    parser = argparse.ArgumentParser()
    forms = parser.add_subparsers(dest="form", required=True)
    writing = forms.add_parser("prepare")
    writing.add_argument("source")
    writing.add_argument("folder")
    reading = forms.add_parser("read")
    reading.add_argument("folder")
    reading.add_argument("--batch-size", type=int, required=True)
    reading.add_argument("--workers", type=int, required=True)
    reading.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    if given.form == "prepare":
        prepare(given.source, given.folder)
        print("{}")
    else:
        read(given.folder, given.batch_size, given.workers, given.seconds)
