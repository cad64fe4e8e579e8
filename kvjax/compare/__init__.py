"""Compares training runs: `python -m kvjax.compare runs/a runs/b`.

`runs` reads workdirs and finds runs that cannot be compared. `groups` averages over seeds.
`downstream` reads benchmark scores. `savings` computes how many fewer tokens one model needs to
reach another's loss. `report` makes tables and figures, `verdict` sentences. No weights are read.
"""
