"""Tiny models of transformers with random weights, and their logits, for kvjax to compare with.

    make test-live                                          # makes its own, and compares
    .venv-live/bin/python tests/convert/make_logits.py      # writes tests/convert/published again

Needs torch and transformers (constraints-live.txt), not kvjax. No weight is zero, no gain is 1, and
epsilons are large, so that an omitted or confused value changes the logits.
"""

import argparse
import json
import math
import pathlib
import platform
import shutil

import numpy as np
import tokenizers
import torch
import transformers

PUBLISHED = pathlib.Path(__file__).parent / "published"
ROWS = 40  # 38 tokens, one of them special, and two spare rows
CHARACTERS = "Ġabcdefghijklmnopqrstuvwxyz0123456789"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def configs(width: int, layers: int, tokens: int) -> dict[str, transformers.PreTrainedConfig]:
    """Returns configs by name, one for each difference between families."""
    gpt2 = dict(vocab_size=ROWS, n_positions=tokens, n_embd=width, n_layer=layers, n_head=4)
    gpt2 |= dict(layer_norm_epsilon=1e-2, bos_token_id=0, eos_token_id=0)
    llama = dict(
        vocab_size=ROWS,
        hidden_size=width,
        intermediate_size=2 * width - 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        rms_norm_eps=1e-2,
        bos_token_id=0,
        eos_token_id=0,
    )

    def angles(base):
        return dict(rope_type="default", rope_theta=base)

    # Steep and short, so that pairs of all three kinds of Llama 3 matter within few tokens.
    scaled = dict(rope_type="llama3", rope_theta=50.0, factor=4.0)
    scaled |= dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24)
    # Some pairs slowed, some unchanged, some between.
    yarn = dict(rope_type="yarn", rope_theta=20.0, factor=4.0, beta_fast=3.0, beta_slow=0.5)
    yarn |= dict(original_max_position_embeddings=24)
    full, sliding = "full_attention", "sliding_attention"
    by_layer = [(sliding, full, sliding)[i % 3] for i in range(layers)]
    padless = llama | dict(pad_token_id=None)  # whose default is an id
    of = transformers
    return {
        "gpt2": of.GPT2Config(**gpt2),
        "gpt2_exact_gelu": of.GPT2Config(
            **gpt2, activation_function="gelu", n_inner=3 * width, tie_word_embeddings=False
        ),
        "llama": of.LlamaConfig(
            **llama | dict(num_key_value_heads=4), rope_parameters=angles(500.0)
        ),
        "llama_tied_bias": of.LlamaConfig(
            **llama, tie_word_embeddings=True, attention_bias=True, rope_parameters=angles(10_000.0)
        ),
        "llama3_rope": of.LlamaConfig(
            **llama | dict(num_key_value_heads=1),
            head_dim=width // 2,
            tie_word_embeddings=True,
            rope_parameters=scaled,
        ),
        "mistral_window": of.MistralConfig(
            **llama, sliding_window=5, rope_parameters=angles(1000.0)
        ),
        "qwen2": of.Qwen2Config(
            **llama, tie_word_embeddings=True, rope_parameters=angles(1_000_000.0)
        ),
        "qwen2_window": of.Qwen2Config(
            **llama,
            use_sliding_window=True,
            sliding_window=3,
            max_window_layers=0,
            rope_parameters=angles(100.0),
        ),
        "qwen3": of.Qwen3Config(**llama, head_dim=width // 2, rope_parameters=angles(200.0)),
        "nanochat": of.NanoChatConfig(**padless, rope_parameters=angles(300.0)),
        "nanochat_bias": of.NanoChatConfig(
            **padless | dict(num_key_value_heads=1),
            head_dim=width // 2,
            hidden_act="gelu",
            attention_bias=True,
            tie_word_embeddings=True,
            final_logit_softcapping=None,
            rope_parameters=scaled,
        ),
        "phi3": of.Phi3Config(**padless, rope_parameters=angles(400.0)),
        "phi3_window": of.Phi3Config(
            **padless | dict(num_key_value_heads=4),
            sliding_window=5,
            tie_word_embeddings=True,
            rope_parameters=angles(10_000.0),
        ),
        "granite": of.GraniteConfig(
            **llama,
            embedding_multiplier=3.0,
            residual_multiplier=0.3,
            attention_multiplier=0.6,
            logits_scaling=7.0,
            rope_parameters=angles(300.0),
        ),
        "granite_tied_bias": of.GraniteConfig(
            **llama | dict(num_key_value_heads=4),
            embedding_multiplier=12,
            attention_multiplier=0.125,
            tie_word_embeddings=True,
            attention_bias=True,
            rope_parameters=angles(500.0),
        ),
        "olmo2": of.Olmo2Config(**padless, rope_parameters=angles(600.0)),
        "olmo2_bias": of.Olmo2Config(
            **padless | dict(num_key_value_heads=4),
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters=angles(10_000.0),
        ),
        "qwen2_some_windows": of.Qwen2Config(
            **llama,
            use_sliding_window=True,
            sliding_window=3,
            max_window_layers=1,
            rope_parameters=yarn | dict(attention_factor=1.4),
        ),
        "qwen3_yarn": of.Qwen3Config(
            **llama,
            head_dim=width // 2,
            use_sliding_window=True,
            sliding_window=4,
            layer_types=by_layer,
            rope_parameters=yarn,
        ),
        "olmo3": of.Olmo3Config(
            **padless,
            sliding_window=4,
            layer_types=by_layer,
            rope_parameters={full: yarn, sliding: angles(30.0)},
        ),
        "olmo3_linear": of.Olmo3Config(
            **padless | dict(num_key_value_heads=4),
            attention_bias=True,
            tie_word_embeddings=True,
            sliding_window=5,
            layer_types=by_layer[::-1],
            rope_parameters={
                full: dict(rope_type="linear", rope_theta=20.0, factor=3.0),
                sliding: angles(20.0),
            },
        ),
        "smollm3": of.SmolLM3Config(
            **padless, no_rope_layers=[1, 0, 1, 1] * layers, rope_parameters=angles(40.0)
        ),
        "smollm3_window": of.SmolLM3Config(
            **padless | dict(num_key_value_heads=4),
            attention_bias=True,
            tie_word_embeddings=False,
            use_sliding_window=True,
            sliding_window=6,
            no_rope_layer_interval=2,
            rope_parameters=yarn,
        ),
        "gemma2": of.Gemma2Config(
            **padless,
            head_dim=width // 2,
            query_pre_attn_scalar=13,
            sliding_window=4,
            layer_types=by_layer,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=3.0,
            rope_parameters=angles(200.0),
        ),
        "gemma2_uncapped": of.Gemma2Config(
            **padless | dict(num_key_value_heads=4),
            head_dim=width // 2,
            query_pre_attn_scalar=width // 2,
            attention_bias=True,
            tie_word_embeddings=False,
            sliding_window=4,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            rope_parameters=yarn,
        ),
        "gemma3": of.Gemma3TextConfig(
            **padless,
            head_dim=width // 2,
            query_pre_attn_scalar=11,
            sliding_window=4,
            layer_types=by_layer,
            rope_parameters={
                full: dict(rope_type="linear", rope_theta=90.0, factor=3.0),
                sliding: angles(20.0),
            },
        ),
        "gemma3_full": of.Gemma3TextConfig(
            **padless,
            head_dim=width // 2,
            layer_types=[full] * layers,
            rope_parameters={full: angles(90.0), sliding: angles(20.0)},
        ),
    }


STORED = {"qwen2": torch.bfloat16, "mistral_window": torch.float16}  # the others in float32
SHARDED = ("llama",)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Gives every weight a random value: matrices N(0, 1/in), gains in [0.5, 1.5]."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and name.endswith("weight"):
                weight.uniform_(0.5, 1.5, generator=generator)
            elif weight.ndim == 1:
                weight.normal_(0, 0.5, generator=generator)
            else:
                weight.normal_(0, 1, generator=generator)
                if "embed" not in name and "wte" not in name:
                    is_conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
                    weight /= math.sqrt(weight.shape[0 if is_conv1d else 1])


def write(folder: pathlib.Path, config, seed: int, tokens: int) -> None:
    """Writes a folder as published, and logits.npz.

    Its arrays are tokens [B, T], their logits [B, T, V], and the most likely continuation of the
    first half of the tokens, greedy [B, T / 2].
    """
    name = folder.name
    shutil.rmtree(folder, ignore_errors=True)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, seed)
    model.to(STORED.get(name, torch.float32))
    sharded = dict(max_shard_size="8KB") if name in SHARDED else {}
    model.save_pretrained(folder, **sharded)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # As read from the files, in float32: `to` rounds RoPE's frequencies too.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens_BT = np.random.default_rng(seed).integers(0, ROWS, (2, tokens), np.int32)
    tokens = torch.as_tensor(tokens_BT).long()
    with torch.no_grad():
        logits_BTV = model.eval()(tokens).logits.numpy()
        half = tokens.shape[1] // 2
        model.generation_config.eos_token_id = None  # no token ends a text
        options = dict(max_new_tokens=half, do_sample=False, pad_token_id=0)
        options |= dict(attention_mask=torch.ones_like(tokens[:, :half]))  # no token is padding
        greedy = model.generate(tokens[:, :half], **options)[:, half:].numpy()
    greedy = greedy.astype(np.int32)
    np.savez(folder / "logits.npz", tokens=tokens_BT, logits=logits_BTV, greedy=greedy)
    tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
    about = dict(bos_token="<|endoftext|>", tokenizer_class="PreTrainedTokenizerFast")
    (folder / "tokenizer_config.json").write_text(json.dumps(about) + "\n")
    if name == "qwen2":
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def tokenizer() -> tokenizers.Tokenizer:
    """Returns a byte-level BPE with fewer tokens than the models have rows."""
    vocab = {token: i for i, token in enumerate(("<|endoftext|>", *CHARACTERS))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer, backend.decoder = level, tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=PUBLISHED)
    for option, default in (("seed", 0), ("width", 16), ("layers", 2), ("tokens", 24)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sizes = dict(width=options.width, layers=options.layers, tokens=options.tokens)
    for i, (name, config) in enumerate(configs(**sizes).items()):
        write(options.out / name, config, 100 * options.seed + i, options.tokens)
    versions = dict(
        command="python tests/convert/make_logits.py",
        options=sizes | dict(seed=options.seed),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        tokenizers=tokenizers.__version__,
    )
    (options.out / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
