"""Runs beside each other: `python -m kvjax.compare runs/a runs/b`.

`runs` reads workdirs and says which cannot be compared, `groups` takes means over seeds, `savings`
asks who reaches a loss with fewer tokens, `report` shows it. Nothing here reads a weight.
"""
