"""What makes a Keras model fit: micro-batches, recomputation, precision, adapters."""
