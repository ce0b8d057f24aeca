"""Data larger than memory: what it is, how it is read within a budget, in which order, and how it is converted."""
