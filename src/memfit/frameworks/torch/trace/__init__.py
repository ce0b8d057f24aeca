"""A training step as a timeline and a profile; what a plan must know of its loss."""
