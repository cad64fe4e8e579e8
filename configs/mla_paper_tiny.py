"""MLA as in the LRKV paper, no RoPE key, 4 heads of 32, at demo size.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mla_paper_tiny", scale="tiny", attention=recipes.mla_paper(4, latent=48, dim=32))
