"""What `import kvjax` offers: layers, caches, decode attention and models for other programs.

`kvjax/__init__.py` lists the names; each is imported when it is first used.
"""
