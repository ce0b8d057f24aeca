"""Tensors without memory: shapes, where they come from, how long their storages live."""
