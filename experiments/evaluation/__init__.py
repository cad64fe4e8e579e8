"""Benchmarks on what lies in ordinary packages, and agreement with another implementation."""
