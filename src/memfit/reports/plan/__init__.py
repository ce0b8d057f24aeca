"""Plans as text, page, JSON and code."""
