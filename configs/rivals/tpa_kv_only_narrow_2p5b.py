"""TPA, KV-only, of ranks 3 and 3: 36 layers, width 2304, 18 heads of 128.

Tensor product attention with dense queries (TPA KV-only, arXiv 2501.06425, section 3).
Cached per token and layer: 876 elements beside the 832 of mla_2p5b; parameters as MHA, by the width
of the MLP.

    python -m kvjax.main --config=configs/rivals/tpa_kv_only_narrow_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,596,220,928 parameters, 2,445,225,984 without the input embedding; 63,072 cache bytes
per token in bfloat16; 16.713 GFLOP per trained token.
Matched: 2,596,220,928 parameters here, 2,595,225,600 in mha_2p5b, a difference of +0.038 %;
MLP of 11,088 for 9,216.
Budget: 50B tokens in steps of 262,144: 836 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.29 days for 836 exaFLOPs: at most 96.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "tpa_kv_only_narrow_2p5b",
        scale="2p5b",
        attention=recipes.tpa(18, query_factors=0, key_rank=3, value_rank=3),
        model=dict(mlp_dim=11088),
    )
