"""Data larger than memory: what a file holds, another type or format, how fast it streams.

Examples:
  memfit data inspect train.h5
  memfit data convert train.npy small.npy --dtype float32
  memfit data bench train.parquet --batch-size 256

Each has its own --help. Exit codes: 0 done, 2 bad usage or input, 130 interrupted
"""

import argparse
from collections.abc import Callable
from typing import Any

import memfit
from memfit.commands import EXIT_FITS, output
from memfit.commands.parser import add_aliases
from memfit.core.errors import BadInput

_INSPECT = """Show what a file of samples holds, what loading it costs, and how it streams.

Examples:
  memfit data inspect train.npy
  memfit data inspect train.h5 --columns images --labels labels --memory 256MiB
  memfit data inspect "shards/*.parquet" --labels price --json

Only headers are read, and a few blocks for a first look at the values.

Exit codes: 0 done, 2 bad usage or input
"""

_CONVERT = """Convert a file of samples to another dtype or format, whatever its size.

Examples:
  memfit data convert train.npy small.npy --dtype float32
  memfit data convert train.csv train.parquet --labels price
  memfit data convert train.npz folder
  memfit data convert photos photos.npy --image-size 224
  memfit data convert train.npy train.h5 --dtype float16 --chunk 1MiB --compress gzip

DST ends in .npy, .h5 or .parquet, or is a folder, which gets one .npy file a field. Nothing is loaded
as a whole, and DST appears when it is complete. The rounding error is measured;
values that overflow are refused. An interrupted conversion to .npy continues when the same command
is run again; other formats start over.

Exit codes: 0 done, 2 bad usage or input, 130 interrupted
"""

_BENCH = """Measure how fast a file of samples streams, compared with a sequential read.

Examples:
  memfit data bench train.npy
  memfit data bench train.h5 --batch-size 256 --memory 1GiB --num-workers 4 --seconds 20

Files are dropped from the page cache before each measurement, so that the disk is measured.

Exit codes: 0 done, 2 bad usage or input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments: three commands of its own."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    inspect, convert, bench = (
        actions.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text.partition("\n")[0],
            epilog=text.partition("\n")[2].strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for name, text in (("inspect", _INSPECT), ("convert", _CONVERT), ("bench", _BENCH))
    )
    inspect.add_argument("path", metavar="PATH", help="a file, a folder, or a pattern in quotes")
    _add_choice(inspect)
    _add_budget(inspect)

    convert.add_argument("source", metavar="SRC", help="a file, a folder, or a pattern in quotes")
    convert.add_argument("destination", metavar="DST", help="a .npy, .h5 or .parquet file, or a folder")
    convert.add_argument("--dtype", metavar="TYPE", help="float32, float16, ...; as stored by default")
    convert.add_argument(
        "--chunk",
        metavar="SIZE",
        help="bytes per write, and per HDF5 chunk or row group; default 8MiB for .npy, 1MiB for the others",
    )
    convert.add_argument("--image-size", metavar="SIZE", help="resize images to this: 224, or 240x320 (height x width)")
    _add_choice(convert)
    convert.add_argument("--compress", metavar="METHOD", help="gzip or lzf for .h5; gzip, snappy or zstd for .parquet")
    convert.add_argument("--allow-overflow", action="store_true", help="let values that overflow become infinite")
    convert.add_argument("--overwrite", action="store_true", help="replace DST, or an unfinished conversion to it")

    bench.add_argument("path", metavar="PATH", help="a file, a folder, or a pattern in quotes")
    _add_choice(bench)
    _add_budget(bench)
    bench.add_argument("--num-workers", type=int, default=0, metavar="N", help="processes that make batches; default 0")
    bench.add_argument("--seconds", type=float, default=5.0, metavar="S", help="for each measurement; default 5")
    for child in (inspect, convert, bench):
        child.add_argument("--json", action="store_true", help="write JSON to standard output")
        if child is convert:
            child.add_argument("--quiet", "-q", action="store_true", help="no progress bar and no report")
        child.set_defaults(parser=child)
        add_aliases(child)


def run(arguments: argparse.Namespace) -> int:
    """Inspects, converts or measures, and reports; without an action, shows the help."""
    if arguments.action is None:
        arguments.parser.print_help()
        return EXIT_FITS
    result, report = {"inspect": _inspect, "convert": _convert, "bench": _bench}[arguments.action](arguments)
    if arguments.json:
        output.print_json(result.to_json())
    elif not getattr(arguments, "quiet", False):
        output.print_report(report(result))
    return EXIT_FITS


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--columns", metavar="A,B", help="columns, keys or datasets that are features")
    parser.add_argument("--labels", metavar="NAME", help="the label column, key or dataset, or a file of labels")
    parser.add_argument("--follow-links", action="store_true", help="follow links that lead out of the folder or file")


def _add_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory", default="512MiB", metavar="SIZE", help="budget of the stream; default 512MiB")
    parser.add_argument("--batch-size", "-b", type=int, default=32, metavar="N", help="samples per batch; default 32")
    parser.add_argument(
        "--on-error", choices=("fail", "skip"), default="fail", help="for images that can't be read; default fail"
    )


def _reading(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of all three that say what is read."""
    columns = None
    if arguments.columns is not None:
        columns = [name.strip() for name in arguments.columns.split(",")]
        if not all(columns):
            raise BadInput(
                f"--columns {arguments.columns!r} has an empty name in it. Write names with commas between: "
                "--columns a,b"
            )
    return {"columns": columns, "labels": arguments.labels}


def _streaming(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments that say how it is streamed."""
    options = memfit.StreamOptions(on_error=arguments.on_error, follow_links=arguments.follow_links)
    return {"memory": arguments.memory, "batch_size": arguments.batch_size, "options": options}


def _inspect(arguments: argparse.Namespace) -> tuple[Any, Callable[[Any], Any]]:
    from memfit.reports.data.figures import inspection_report

    inspection = memfit.inspect_data(arguments.path, **_reading(arguments), **_streaming(arguments))
    return inspection, inspection_report


def _convert(arguments: argparse.Namespace) -> tuple[Any, Callable[[Any], Any]]:
    from memfit.reports.data.figures import conversion_report

    with output.transfer_progress("converting", quiet=arguments.quiet or arguments.json) as progress:
        conversion = memfit.convert_data(
            arguments.source,
            arguments.destination,
            dtype=arguments.dtype,
            compression=arguments.compress,
            overwrite=arguments.overwrite,
            options=memfit.ConvertOptions(
                arguments.chunk, arguments.allow_overflow, arguments.follow_links, progress, arguments.image_size
            ),
            **_reading(arguments),
        )
    return conversion, conversion_report


def _bench(arguments: argparse.Namespace) -> tuple[Any, Callable[[Any], Any]]:
    from memfit.reports.data.figures import speed_report

    with output.progress("measuring", quiet=arguments.json):
        speed = memfit.bench_data(
            arguments.path,
            num_workers=arguments.num_workers,
            seconds=arguments.seconds,
            **_reading(arguments),
            **_streaming(arguments),
        )
    return speed, speed_report
