"""Estimates, largest batches and comparisons as text, page and JSON."""
