"""What keeps a `fit` of Keras going when memory runs out."""
