"""Training steps of JAX that run as the settings of a plan say."""
