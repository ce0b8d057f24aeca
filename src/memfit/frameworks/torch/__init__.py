"""PyTorch: a simulated device that runs a real training step on shapes alone."""
