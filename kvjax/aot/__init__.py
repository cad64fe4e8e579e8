"""`python -m kvjax.aot`: compiles a run for absent chips. Does it fit? How fast can it be?"""
