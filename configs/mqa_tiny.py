"""MQA, 4 heads of 32, at demo size.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain("mqa_tiny", scale="tiny", attention=recipes.mqa(4, dim=32))
