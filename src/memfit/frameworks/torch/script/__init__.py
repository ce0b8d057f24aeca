"""Unmodified scripts on a simulated device: files, processes, loaders, launchers."""
