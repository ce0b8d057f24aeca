"""What PyTorch's operators allocate on CUDA devices and on the CPU."""
