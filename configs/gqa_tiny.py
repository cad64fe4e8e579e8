"""GQA with 2 KV heads, 4 heads of 32, at demo size.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("gqa_tiny", scale="tiny", attention=recipes.gqa(4, kv_heads=2, dim=32))
