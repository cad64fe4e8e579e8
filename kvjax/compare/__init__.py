"""Compares training runs: `python -m kvjax.compare runs/a runs/b`.

`runs` reads workdirs and reports which cannot be compared, `groups` averages over seeds,
`savings` computes how many fewer tokens reach a loss, `report` makes tables and figures, `verdict`
sentences. No weights are read.
"""
