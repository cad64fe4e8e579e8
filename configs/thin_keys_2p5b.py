"""Thin keys of 32 channels: 36 layers, width 2304, 18 heads of 128.

Keys of a quarter of the values' channels, from scratch (arXiv 2603.04427: d_select = d/4).
The mechanism of thin_keys_tiny.py at the LRKV paper's scale d36; no paper reports it.

    python -m kvjax.main --config=configs/thin_keys_2p5b.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 2,308,571,136 parameters, 2,157,576,192 without the input embedding; 207,360 cache bytes
per token in bfloat16; 14.219 GFLOP per trained token.
Budget: 50B tokens in steps of 262,144: 711 exaFLOPs.
Target: v5p:2x2x4 (16 chips).
At least 1.11 days for 711 exaFLOPs: at most 96.8% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "thin_keys_2p5b", scale="2p5b", attention=recipes.thin_keys(18, key_dim=32)
    )
