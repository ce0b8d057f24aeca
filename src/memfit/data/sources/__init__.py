"""One module a format, and one that finds out which of them a path is."""
