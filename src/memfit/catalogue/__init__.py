"""Devices and what is known of each: memory, rates, and where every figure comes from."""

from memfit.catalogue.query import find_device, list_devices

__all__ = ["find_device", "list_devices"]
