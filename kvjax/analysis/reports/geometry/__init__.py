"""Norms and angles of LRKV's bases and residuals, over layers and training steps."""
