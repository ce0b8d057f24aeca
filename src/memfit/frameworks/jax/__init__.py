"""JAX: training steps, compiled for shapes and read."""
