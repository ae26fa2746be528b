"""The kernels on the CPU: a host emulation of the CUDA execution model (see runner.py)."""
