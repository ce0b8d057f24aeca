"""How fast shuffled epochs over HDF5 and Parquet files are, against loops written by hand for each format.

    python -m benchmarks.stream_tables [--size 500MB] [--repeats 5] [--folder FOLDER]

The loops read whole chunks with h5py and whole row groups with pyarrow in a shuffled order, and shuffle what they have
in memory, which is a batch or a row group: less shuffled than ours, and less work. Readers take turns in processes of
their own, in control groups of 600 MB, with a cold page cache.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.reporting import Bar, bullets, publish, table
from benchmarks.stream_cases import LIMIT_BYTES, how_cold, python_command, scratch, table_of, write_hdf5, write_parquet
from benchmarks.stream_readers import MEMORY
from benchmarks.stream_speed import BATCH_SIZE, Reader, median_ratio, run
from memfit.core.units import KIB, format_size, parse_size

ROW_BYTES = 4 * KIB
# Rows of a chunk (256 KiB and 1 MiB) and of a row group (1 MiB and 8 MiB).
CHUNK_ROWS = (64, 256)
GROUP_ROWS = (256, 2048)


def readers_of(path: Path, loop: str, shown: str) -> list[Reader]:
    """The loop by hand, and ours without workers and with two."""

    def reader(name: str, kind: str, workers: int = 0) -> Reader:
        options = ("--workers", workers, "--batch-size", BATCH_SIZE)
        return Reader(f"{shown}: {name}", python_command("benchmarks.stream_readers", kind, path, *options), [path])

    return [reader(f"{loop} by hand", loop), reader("memfit.stream", "memfit"), reader("2 workers", "memfit", 2)]


def main() -> int:
    """Makes the files, runs the readers in turns and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="500MB", help="of the samples of each file; default 500MB")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each reader; default 5")
    parser.add_argument("--folder", help="where the data is made; by default where temporary files go")
    parser.add_argument("--drop-caches", action="store_true", help="empty the machine's whole page cache before runs")
    given = parser.parse_args()
    rows = table_of(parse_size(given.size), ROW_BYTES)
    cases: list[list[Reader]] = []
    with scratch(given.folder) as place:
        for count in CHUNK_ROWS:
            path = write_hdf5(place / f"chunks-{count}.h5", rows, chunk_rows=count)
            cases.append(readers_of(path, "h5py", f"HDF5, gzip, chunks of {count} rows"))
        for count in GROUP_ROWS:
            path = write_parquet(place / f"groups-{count}.parquet", rows, group_rows=count)
            cases.append(readers_of(path, "pyarrow", f"Parquet, snappy, row groups of {count} rows"))
        for _ in range(given.repeats):
            for reader in (reader for case in cases for reader in case if not reader.trouble):
                run(reader, rows, given.drop_caches)
    bars, found = [], []
    for case in cases:
        by_hand, plain, _ = case
        ratio = median_ratio(plain, by_hand)
        bars.append(Bar(f"{plain.name} against {by_hand.name}", f"{ratio:.2f}x", "at least 0.9x", ratio >= 0.9))
        for reader in case:
            rate = f"{reader.rate:,.0f}" if reader.rate else reader.trouble
            against = f"{median_ratio(reader, by_hand):.2f}x"
            found.append((reader.name, rate, against, f"{reader.most_bytes / 10**6:,.0f}"))
    method = bullets(
        [
            f"{format_size(rows.num_bytes)} of float32 in {rows.num_rows:,} rows of {format_size(ROW_BYTES)} and a "
            f"label for each; batches of {BATCH_SIZE}; {given.repeats} runs of each reader, in turns.",
            f"Each run in a control group of {LIMIT_BYTES // 10**6} MB; memfit.stream with memory={MEMORY!r}.",
            how_cold(given.drop_caches),
        ]
    )
    head = ("reader", "rows/s, median", "against the loop by hand", "most charged to the group, MB")
    complete = rows.num_bytes >= 490 * 10**6 and given.repeats >= 5
    sections = ["## How", method, "## Rates", table(head, found)]
    publish("stream_tables", "Shuffled epochs of HDF5 and Parquet files", bars, sections, save=complete)
    return 0


if __name__ == "__main__":
    sys.exit(main())
