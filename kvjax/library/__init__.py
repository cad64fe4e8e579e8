"""Public interface of `import kvjax`: layers, caches, decode attention and whole models.

`kvjax/__init__.py` lists the names; each is imported when it is first used.
"""
