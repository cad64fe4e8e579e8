"""Keys of a published config.json that do not change the model.

Every other key is refused unless the config's family reads it: transformers ignores unknown keys,
so a config may have another family's keys under a known `model_type`. The names are from
transformers' configuration classes (4.46 and 5.14) and from published configs.
"""

from collections.abc import Mapping

_OF_ANY_MODEL = """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled
    _name_or_path _num_labels architectures attn_implementation author auto_map
    chunk_size_feed_forward created_date cross_attention_hidden_size dtype finetuning_task
    gradient_checkpointing id2label is_decoder keys_to_ignore_at_inference label2id
    license model_type name_or_path num_labels
    output_attentions output_hidden_states prefix problem_type return_dict task_specific_params
    tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype torchscript transformers_version
    transformers.js_config unsloth_fixed unsloth_version use_bfloat16 use_cache use_flash_attention
    xla_device
"""
_OF_TOKENS = """
    bos_token bos_token_id decoder_start_token_id eos_token eos_token_id eos_token_ids pad_token
    pad_token_id sep_token_id unk_token_id
"""
_OF_GENERATION = """
    bad_words_ids begin_suppress_tokens cache_implementation diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature
    top_k top_p typical_p
"""
_OF_TRAINING = """
    attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout embd_pdrop
    hidden_dropout hidden_dropout_prob initializer_range loss_type neftune_noise_alpha
    pretraining_tp resid_pdrop reorder_and_upcast_attn
"""
_OF_FAMILIES = """
    is_llama_config max_sequence_length model_max_length n_ctx n_special output_past
    predict_special_tokens summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj
"""
_HARMLESS = frozenset(
    f"{_OF_ANY_MODEL} {_OF_TOKENS} {_OF_GENERATION} {_OF_TRAINING} {_OF_FAMILIES}".split()
)
# Keys that change nothing if they have one of these values.
NEUTRAL = dict(
    activation=("swiglu",),  # Falcon 3, beside hidden_act
    add_cross_attention=(False,),
    attention_bias=(False,),  # in families that do not read it
    attn_output_gate=(False,),
    bias=(False,),
    embedding_multiplier=(1,),
    full_attn_mod=(1,),  # Phi-4-mini, as interpolate_factor and lm_head_bias
    interpolate_factor=(1,),
    is_causal=(True,),
    is_encoder_decoder=(False,),
    lm_head_bias=(False,),
    logit_scale=(1,),
    logits_scaling=(1,),
    mlp_bias=(False,),
    partial_rotary_factor=(1,),
    pruned_heads=({},),
    qk_norm=(False,),
    residual_multiplier=(1,),
    rope_interleaved=(False,),  # SmolLM2
    scale_attn_by_inverse_layer_idx=(False,),
    scale_attn_weights=(True,),
    scale_emb=(1,),
    use_mrope=(False,),  # Qwen 2.5
    use_parallel_residual=(False,),
    use_qk_norm=(False,),
)


def changes_nothing(key: str, config: Mapping) -> bool:
    """Returns True for a key that no model reads, or whose value in this config is neutral."""
    value = config[key]
    if key == "no_rope_layers":  # SmolLM3: 1 for a layer that RoPE rotates
        return isinstance(value, list) and bool(value) and all(layer == 1 for layer in value)
    if key == "no_rope_layer_interval":  # read only without no_rope_layers
        return bool(config.get("no_rope_layers"))
    if key == "sliding_window_size":  # Gemma 2 9B: a copy that no model reads
        return value == config.get("sliding_window")
    return key in _HARMLESS or value in NEUTRAL.get(key, ())
