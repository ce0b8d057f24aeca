"""Memory snapshots that PyTorch writes on a real GPU."""
