"""TPA, KV-only, of ranks 9 and 9: 36 layers, width 2304, 18 heads of 128.

Tensor product attention with dense queries (TPA KV-only, arXiv 2501.06425, section 3).
Cached per token and layer: 2,628 elements beside the 2,560 of lrkv_2p5b; parameters as MHA, by the
width of the MLP.

    python -m kvjax.main --config=configs/rivals/tpa_kv_only_wide_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Parameters: 2,595,557,376 parameters, 2,444,562,432 without the input embedding; 189,216 cache bytes
per token in bfloat16; 16.715 GFLOP per trained token.
Matched: 2,595,557,376 parameters here, 2,595,225,600 in mha_2p5b, a difference of +0.013 %;
MLP of 10,208 for 9,216.
Budget: 50B tokens in steps of 262,144: 836 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.29 days for 836 exaFLOPs: at most 96.2% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "tpa_kv_only_wide_2p5b",
        scale="2p5b",
        attention=recipes.tpa(18, query_factors=0, key_rank=9, value_rank=9),
        model=dict(mlp_dim=10208),
    )
