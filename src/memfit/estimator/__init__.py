"""Traces made into estimates: other batch sizes, bounds, host memory."""
