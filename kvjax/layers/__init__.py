"""What all parts of a model share: weights that know their axes, norms, rotary positions."""
