"""Benchmarks from ordinary Python packages, and agreement with transformers."""
