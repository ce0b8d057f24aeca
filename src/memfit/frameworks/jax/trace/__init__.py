"""A training step of JAX, compiled for shapes and read as a timeline."""
