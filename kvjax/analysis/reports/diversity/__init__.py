"""Report on how much the heads of a layer differ."""
