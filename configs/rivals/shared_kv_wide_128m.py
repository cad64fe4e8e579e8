"""Shared KV with 4 KV heads of 256: 12 layers, width 768, 8 heads of 256.

One vector as key and value with VO-RoPE ("S2", Su, kexue.fm 10862).
Cached per token and layer: 1,024 elements beside the 1,024 of lrkv_128m; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/shared_kv_wide_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,597,952 parameters, 135,266,304 without the input embedding; 24,576 cache bytes
per token in bfloat16; 1.416 GFLOP per trained token.
Matched: 185,597,952 parameters here, 185,597,952 in mha_128m, a difference of +0.000 %;
MLP of 2,048 for 3,072.
Budget: 100B tokens in steps of 524,288: 142 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.43 days for 142 exaFLOPs: at most 95.4% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "shared_kv_wide_128m",
        scale="128m",
        attention=recipes.shared_kv(8, kv_heads=4, dim=256),
        model=dict(mlp_dim=2048),
    )
