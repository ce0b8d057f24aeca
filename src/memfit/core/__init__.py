"""Frozen data, units and errors that every other part shares; no algorithms, no frameworks."""
