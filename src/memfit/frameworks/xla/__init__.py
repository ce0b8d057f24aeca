"""XLA: compiled programs, read for what they hold in memory."""
