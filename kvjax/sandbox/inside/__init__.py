"""What runs in the locked interpreters: sent to them as text, so it imports the standard library.

`start` is what both begin with. Nothing here is trusted by the process that judges: it counts
bytes, compares random numbers and hands lines on.
"""
