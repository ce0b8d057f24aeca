"""What `torch.cuda` answers on a machine without CUDA."""
