"""LRKV, rank 16 of 32, 4 heads of 32, at demo size.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("lrkv_tiny", scale="tiny", attention=recipes.lrkv(4, rank=16, dim=32))
