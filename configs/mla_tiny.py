"""MLA, decoupled RoPE key, 4 heads of 32, at demo size.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mla_tiny", scale="tiny", attention=recipes.mla(4, latent=48, rope_dim=16, dim=32))
