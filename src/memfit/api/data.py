"""`memfit.inspect_data`, `memfit.convert_data` and `memfit.bench_data`: files of samples, whatever their size."""

from memfit.data.convert import ConvertOptions, convert_data
from memfit.data.inspection import inspect_data
from memfit.data.speed import bench_data

__all__ = ["ConvertOptions", "bench_data", "convert_data", "inspect_data"]
