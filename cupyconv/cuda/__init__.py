"""The CUDA backend: `plan` decides without a GPU, `run` executes on a Device."""
