"""What configs share: scales, mechanisms, presets. A config file picks from here and runs nothing.

config = recipes.pretrain("lrkv_128m", scale="128m", attention=recipes.lrkv(6, rank=64))
"""

from kvjax.recipes.conversations import EMBEDDED_CONVERSATIONS
from kvjax.recipes.conversations import chat_sft
from kvjax.recipes.conversations import mid_train
from kvjax.recipes.converted import TUNED
from kvjax.recipes.converted import imported
from kvjax.recipes.converted import recover
from kvjax.recipes.mechanisms import HEAD_DIM
from kvjax.recipes.mechanisms import factored
from kvjax.recipes.mechanisms import gla
from kvjax.recipes.mechanisms import gqa
from kvjax.recipes.mechanisms import grouped
from kvjax.recipes.mechanisms import gta
from kvjax.recipes.mechanisms import lrkv
from kvjax.recipes.mechanisms import mfa
from kvjax.recipes.mechanisms import mfa_kr
from kvjax.recipes.mechanisms import mha
from kvjax.recipes.mechanisms import mla
from kvjax.recipes.mechanisms import mla_lrkv
from kvjax.recipes.mechanisms import mla_paper
from kvjax.recipes.mechanisms import mlra
from kvjax.recipes.mechanisms import mqa
from kvjax.recipes.mechanisms import plain
from kvjax.recipes.mechanisms import projection_sharing
from kvjax.recipes.mechanisms import shared_kv
from kvjax.recipes.mechanisms import thin_keys
from kvjax.recipes.mechanisms import tpa
from kvjax.recipes.optimizers import PRESETS
from kvjax.recipes.optimizers import adamw
from kvjax.recipes.optimizers import nanochat
from kvjax.recipes.optimizers import paper_text
from kvjax.recipes.optimizers import tuning
from kvjax.recipes.pretraining import pretrain
from kvjax.recipes.scales import VOCAB_SIZE

__all__ = [
    "EMBEDDED_CONVERSATIONS",
    "HEAD_DIM",
    "PRESETS",
    "TUNED",
    "VOCAB_SIZE",
    "adamw",
    "chat_sft",
    "factored",
    "gla",
    "gqa",
    "grouped",
    "gta",
    "imported",
    "lrkv",
    "mfa",
    "mfa_kr",
    "mha",
    "mid_train",
    "mla",
    "mla_lrkv",
    "mla_paper",
    "mlra",
    "mqa",
    "nanochat",
    "paper_text",
    "plain",
    "pretrain",
    "projection_sharing",
    "recover",
    "shared_kv",
    "thin_keys",
    "tpa",
    "tuning",
]
