"""Dry runs as text, page and JSON."""
