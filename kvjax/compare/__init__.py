"""Compares training runs: `python -m kvjax.compare runs/a runs/b`.

`runs` reads workdirs and reports which cannot be compared, `groups` averages over seeds,
`savings` computes how many fewer tokens reach a loss, `report` shows the results, `verdict` says
them in a line. No weights are read.
"""
