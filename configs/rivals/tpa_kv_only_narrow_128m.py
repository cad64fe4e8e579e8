"""TPA, KV-only, of ranks 1 and 1: 12 layers, width 768, 6 heads of 128.

Tensor product attention with dense queries (TPA KV-only, arXiv 2501.06425, section 3).
Cached per token and layer: 268 elements beside the 320 of mla_128m; parameters as MHA, by the width
of the MLP.

    python -m kvjax.main --config=configs/rivals/tpa_kv_only_narrow_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 185,708,544 parameters, 135,376,896 without the input embedding; 6,432 cache bytes
per token in bfloat16; 1.039 GFLOP per trained token.
Matched: 185,708,544 parameters here, 185,597,952 in mha_128m, a difference of +0.060 %;
MLP of 3,712 for 3,072.
Budget: 100B tokens in steps of 524,288: 104 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.35 days for 104 exaFLOPs: at most 97.7% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "tpa_kv_only_narrow_128m",
        scale="128m",
        attention=recipes.tpa(6, query_factors=0, key_rank=1, value_rank=1),
        model=dict(mlp_dim=3712),
    )
