"""Conversion of trained models to smaller caches: the models, texts, methods and results."""
