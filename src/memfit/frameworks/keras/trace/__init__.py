"""A compiled Keras model as a timeline, on each backend."""
