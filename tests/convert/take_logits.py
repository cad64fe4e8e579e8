"""Computes transformers' logits of folders that kvjax wrote, for live.py to compare.

    .venv-live/bin/python tests/convert/take_logits.py FOLDER ...

Each folder has tokens.npy, int32 [B, T], and gets logits.npz: logits [B, T, V] in float32; `greedy`
[B, NEW], the most likely continuation (no token, if positions end before); `cached` [L], the
numbers that a layer's cache holds per token; and `ids`, the tokens of TEXT. Needs torch and
transformers (constraints-live.txt), not kvjax.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

TEXT = "a b 3"
NEW = 12


def take(folder: pathlib.Path) -> None:
    """Writes one folder's logits; fails if its tensors are not the model's."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {name: tensors for name, tensors in report.items() if tensors}
    assert not wrong, (folder.name, wrong)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__], folder.name
    tokens_BT = torch.as_tensor(np.load(folder / "tokens.npy")).long()
    with torch.no_grad():
        found = model.eval()(tokens_BT, use_cache=True)
        greedy_BT = tokens_BT[:, :0]
        if tokens_BT.shape[1] + NEW <= model.config.max_position_embeddings:
            greedy_BT = model.generate(
                tokens_BT,
                attention_mask=torch.ones_like(tokens_BT),
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
            )[:, tokens_BT.shape[1] :]
    cached = [
        sum(x.numel() for x in (layer.keys, layer.values)) // tokens_BT.numel()
        for layer in found.past_key_values.layers
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.bos_token_id == model.config.bos_token_id, folder.name
    if tokenizer.chat_template is not None:
        hello = [dict(role="user", content=TEXT)]
        assert tokenizer.apply_chat_template(hello, tokenize=False) == TEXT
    np.savez(
        folder / "logits.npz",
        logits=found.logits.numpy(),
        greedy=greedy_BT.numpy(),
        cached=cached,
        ids=tokenizer(TEXT)["input_ids"],
    )


if __name__ == "__main__":
    transformers.logging.disable_progress_bar()
    for argument in sys.argv[1:]:
        take(pathlib.Path(argument))
