"""Tiny models that vLLM, SGLang and transformers serve as DeepSeek-V3, with the same small cache.

    python -m kvjax.main --config=configs/serving.py:gta_served_tiny
    python -m kvjax.convert.export --workdir=runs/gta_served_tiny --out=served --format=deepseek

`recipes.servable` sets what differs from the other configs: gains in the norms, SwiGLU, no soft cap
and no QK-norm. 4 layers of width 128, 4 heads of 32 channels, on the embedded corpus. Engines pad
these small latents to 256 channels and RoPE keys to 64. No engine pads a latent of 512 channels and
a RoPE key of 64, which GTA has with 4 KV heads of 128 channels and a RoPE key of 64, and LRKV with
heads of 64 channels and K·R = 224.
"""

from kvjax import recipes

# By name: the attention section, and the MLP width that makes parameters equal MHA's to 0.1 %.
VARIANTS = {
    "mla_served_tiny": (recipes.mla(4, latent=48, rope_dim=16, head_dim=32), 352),
    "gta_served_tiny": (recipes.gta(4, kv_heads=2, rope_dim=16, head_dim=32), 400),
    "lrkv_served_tiny": (recipes.lrkv(4, rank=8, head_dim=32) | dict(rope="shared"), 378),
}
NOTES = {
    "mla_served_tiny": "C = 48, P = 16; the export is exact.",
    "gta_served_tiny": "C = 64, P = 16; the export is exact to 1e-6.",
    "lrkv_served_tiny": "RoPE on the base alone: C = 96, P = 32; the export is exact to 1e-6.",
}


def get_config(variant):
    attention, mlp_dim = VARIANTS[variant]
    return recipes.servable(variant, scale="tiny", attention=attention, model=dict(mlp_dim=mlp_dim))
