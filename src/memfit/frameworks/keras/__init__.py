"""Keras: streams as data sets of its training loop, on every backend."""
