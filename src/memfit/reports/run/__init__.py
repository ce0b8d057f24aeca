"""Supervised runs as text, page and JSON."""
