"""Report on norms and angles of LRKV's bases and residuals, over layers and training steps."""
