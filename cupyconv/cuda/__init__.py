"""The CUDA backend: `plan` makes plans without a GPU, `run` executes them on a `Device`."""
