"""The guard of a PyTorch training loop: a step that runs out of memory is undone and run again."""
