"""A real device's snapshot against a simulation."""
