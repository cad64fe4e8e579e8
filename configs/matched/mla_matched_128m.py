"""MLA with a latent of 256, parameters as MHA: 12 layers, width 768, 6 heads of 128.

No paper's figure: the LRKV paper (arXiv 2601.11471) compares mechanisms of different sizes;
here the MLP makes up for what attention saves.

    python -m kvjax.main --config=configs/matched/mla_matched_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,597,952 parameters, 135,266,304 without the input embedding; 7,680 cache bytes
per token in bfloat16; 1.095 GFLOP per trained token.
Matched: 185,597,952 parameters here, 185,597,952 in mha_128m, a difference of 0;
MLP of 3,232 for 3,072.
Budget: 100B tokens in steps of 524,288: 109 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.36 days for 109 exaFLOPs: at most 96.8% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "mla_matched_128m",
        scale="128m",
        attention=recipes.mla(6, latent=256),
        model=dict(mlp_dim=3232),
    )
