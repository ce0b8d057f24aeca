"""A TensorFlow graph as a timeline: nothing is computed."""
