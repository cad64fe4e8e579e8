"""MHA, 4 heads of 32, at demo size.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mha_tiny", scale="tiny", attention=recipes.mha(4, dim=32))
