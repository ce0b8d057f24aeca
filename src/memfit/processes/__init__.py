"""Runs of a user's script in a process of its own: starting it, ending it, reading what it left."""
