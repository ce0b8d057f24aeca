"""Training steps of JAX that survive an OOM."""
