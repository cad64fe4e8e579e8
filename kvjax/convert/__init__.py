"""Imports published models as workdirs, converts them to smaller KV caches, exports them."""
