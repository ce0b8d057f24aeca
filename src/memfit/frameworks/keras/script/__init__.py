"""Scripts that train with Keras, followed to their first training step."""
