"""Devices and what is known of each: memory, rates, and where every figure comes from."""

from memfit.catalogue.query import find_device, list_devices
from memfit.catalogue.stacks import on_stack

__all__ = ["find_device", "list_devices", "on_stack"]
