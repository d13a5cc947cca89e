"""Benchmarks: the demo's jobs and ten ordinary layers, against concatenate + im2col + matmul.

pytest tests/benchmarks --benchmark-only         with pytest-benchmark's statistics
python -m cupyconv bench                         interleaved medians and their ratios
"""
