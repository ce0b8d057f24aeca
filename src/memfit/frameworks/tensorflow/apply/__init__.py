"""TensorFlow functions that recompute instead of keeping activations."""
