"""Scales, mechanisms and optimizer presets, which a config file combines:

recipes.pretrain("lrkv_128m", scale="128m", attention=recipes.lrkv(6, rank=64))
"""

from kvjax.recipes.conversations import EMBEDDED_CONVERSATIONS, chat_sft, mid_train
from kvjax.recipes.converted import TUNED, imported, recover
from kvjax.recipes.mechanisms import (
    HEAD_DIM,
    factored,
    gla,
    gqa,
    grouped,
    gta,
    lrkv,
    mechanism,
    mfa,
    mfa_kr,
    mha,
    mla,
    mla_lrkv,
    mla_paper,
    mlra,
    mqa,
    projection_sharing,
    shared_kv,
    thin_keys,
    tpa,
    without_qk_norm,
)
from kvjax.recipes.optimizers import PRESETS, adamw, nanochat, paper_text, tuning
from kvjax.recipes.pretraining import pretrain, servable
from kvjax.recipes.scales import VOCAB_SIZE
