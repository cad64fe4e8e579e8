"""Code that runs in the locked interpreters; sent as text, so it imports the standard library only.

`start` is the entry point. The judging process trusts nothing here: it counts bytes, compares
random numbers and passes lines on.
"""
