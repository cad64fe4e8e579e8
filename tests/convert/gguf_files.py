"""GGUF files as llama.cpp's converter writes them, from Hugging Face folders."""

from etils import epath
import gguf
import numpy as np
import tokenizers

from kvjax.convert import tensors

SPECIAL, ADDED = "<|endoftext|>", "<added token>"


def tokens_of(rows):
    """Returns (token, kind) pairs: special, byte letters, merged, added and unused tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [(SPECIAL, gguf.TokenType.CONTROL), *((c, gguf.TokenType.NORMAL) for c in alphabet)]
    tokens += [
        ("ab", gguf.TokenType.NORMAL),
        ("12", gguf.TokenType.NORMAL),
        (ADDED, gguf.TokenType.USER_DEFINED),
    ]
    return tokens + [(f"[PAD{i}]", gguf.TokenType.UNUSED) for i in range(len(tokens), rows)]


def permuted(array, heads):
    """Reorders rows of queries or keys for RoPE of adjacent channels, as llama.cpp's converter."""
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def write(
    path,
    folder,
    architecture,
    *,
    rows=300,
    quantise=None,
    template="{{ messages }}",
    edit=lambda writer, t: None,
):
    """Writes a Hugging Face folder as a GGUF file with a larger vocabulary; returns the tensors.

    Args:
      quantise: GGUF type of one matrix per layer; None: no quantisation.
      edit: changes the writer, and the tensors by name, before they are written.
    """
    config = tensors.json_object(epath.Path(folder / "config.json"))

    def get(*keys):
        return next(config[key] for key in keys if config.get(key) is not None)

    writer = gguf.GGUFWriter(path, architecture)
    layers, heads = get("num_hidden_layers", "n_layer"), get("num_attention_heads", "n_head")
    width = get("hidden_size", "n_embd")
    writer.add_block_count(layers)
    writer.add_context_length(get("max_position_embeddings", "n_positions"))
    writer.add_embedding_length(width)
    writer.add_head_count(heads)
    if architecture == "gpt2":
        writer.add_feed_forward_length(config.get("n_inner") or 4 * width)
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        head_dim = config.get("head_dim") or width // heads
        writer.add_rope_dimension_count(head_dim)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_vocab_size(rows)
    tokens = tokens_of(rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(0)
    writer.add_chat_template(template)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, layers)
    written = {}
    for name, stored in tensors.open_folder(epath.Path(folder)).items():
        array = stored.read().astype(np.float32)
        if name.endswith(("embed_tokens.weight", "wte.weight", "lm_head.weight")):
            array = np.resize(array, (rows, width))
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            array = array.T
        if architecture == "llama" and "q_proj" in name:
            array = permuted(array, heads)
        if architecture == "llama" and "k_proj" in name:
            array = permuted(array, config["num_key_value_heads"])
        written[names.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    edit(writer, written)
    for name, array in written.items():
        array, raw = np.ascontiguousarray(array), None
        if quantise is not None and name.endswith("ffn_down.weight"):
            array, raw = gguf.quantize(array, quantise), quantise
        writer.add_tensor(name, array, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written
