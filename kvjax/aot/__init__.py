"""`python -m kvjax.aot`: a run compiled for chips that are not there; does it fit, how fast?"""
