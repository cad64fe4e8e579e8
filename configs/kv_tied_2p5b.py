"""Q-K=V: 36 layers, width 2304, 18 heads of 128.

Q-K=V: values are the keys before norm and RoPE (projection sharing, eq. 3).
The mechanism of kv_tied_tiny.py at the LRKV paper's scale d36; no paper reports it.

    python -m kvjax.main --config=configs/kv_tied_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 2,404,122,624 parameters, 2,253,127,680 without the input embedding; 165,888 cache bytes
per token in bfloat16; 15.557 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 778 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.19 days for 778 exaFLOPs: at most 95.9% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "kv_tied_2p5b", scale="2p5b", attention=recipes.projection_sharing(18, tie="kv")
    )
