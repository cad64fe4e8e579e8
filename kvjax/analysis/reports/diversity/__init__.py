"""How different the heads of a layer are."""
