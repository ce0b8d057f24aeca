"""TensorFlow: streams as tf.data."""
