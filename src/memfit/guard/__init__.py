"""What guards a training run, whatever its framework: what to try next, what was found, checkpoints, searches."""
