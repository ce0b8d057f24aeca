"""The simulated device: its operators, and what the user's code sees of it."""
