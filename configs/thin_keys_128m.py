"""Thin keys of 32 channels: 12 layers, width 768, 6 heads of 128.

Keys of a quarter of the values' channels, from scratch (arXiv 2603.04427: d_select = d/4).
The mechanism of thin_keys_tiny.py at the LRKV paper's scale d12; no paper reports it.

    python -m kvjax.main --config=configs/thin_keys_128m.py

Data: FineWeb-Edu as Parquet shards in ~/data/fineweb-edu (config.data.source).
Size: 174,981,120 parameters, 124,649,472 without the input embedding; 23,040 cache bytes
per token in bfloat16; 0.889 GFLOP per trained token.
Budget: 100B tokens in steps of 524,288: 89 exaFLOPs.
Target: v5e:4x4 (16 chips).
At least 0.30 days for 89 exaFLOPs: at most 99.1% MFU without masked keys, bound by compute.
Measured: nothing yet.
"""

from kvjax import recipes


def get_config():
    return recipes.pretrain(
        "thin_keys_128m", scale="128m", attention=recipes.thin_keys(6, key_dim=32)
    )
