"""What `torch.compile` makes of a step: compiled by PyTorch itself, but for the code of its kernels."""
