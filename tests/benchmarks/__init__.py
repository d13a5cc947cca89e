"""Benchmarks of the demo's jobs and of ten ordinary layers, against concatenate + im2col + matmul.

pytest tests/benchmarks --benchmark-only         prints pytest-benchmark's statistics
python -m cupyconv bench                         prints interleaved medians and their ratios
"""
