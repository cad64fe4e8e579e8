"""Compiles a run for chips that are not there, to find its memory and a lower bound of its time."""
