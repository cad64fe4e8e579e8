"""Attention modules of other authors beside kvjax's: clones, their side, the comparisons."""
