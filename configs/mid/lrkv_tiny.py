"""LRKV of rank 16, on conversations: 4 layers, width 128, 4 heads of 32.

No paper: mid-training in minutes, on 500 conversations that are made up (letters, and
small sums with calls of the calculator). The vocabulary of its parent grows by eight tokens.

    python -m kvjax.main --config=configs/lrkv_tiny.py
    python -m kvjax.main --config=configs/mid/lrkv_tiny.py

Parent: runs/lrkv_tiny, what configs/lrkv_tiny.py trains (config.train.parent).
Parameters: 1,296,384 parameters, 1,033,216 without the input embedding; 1,600 cache bytes
per token in bfloat16; 0.008 GFLOP per trained token.
Hardware: two CPU cores, 0.4M tokens in about a minute. Measured, one seed: of 200 conversations
made with another seed 100 of 100 letters are right, and 95 of 100 sums.
"""

from kvjax import recipes


def get_config():
    return recipes.mid_train(
        "mid/lrkv_tiny",
        scale="tiny",
        attention=recipes.lrkv(4, rank=16, dim=32),
        data=dict(sequence_length=256, vocab_size=2056),
        train=dict(num_steps=200, batch_size=8, eval_every=50, eval_rows=0, checkpoint_every=50),
        mixture=dict(recipes.EMBEDDED_CONVERSATIONS),
    )
