"""Training scripts that the benchmarks run, for real on the CPU and dry on a simulated GPU."""
