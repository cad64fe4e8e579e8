"""DeepSeek-V3 with dense MLPs in NumPy float64 (arXiv 2412.19437, equations 1 to 11).

Written from the paper; names of tensors and keys are those of the published folders. It shares
nothing with the product.
"""

import numpy as np


def logits(config, tensors, tokens_BT):
    """[B, T, V] from a config.json and tensors by published name."""
    x_BTD = tensors["model.embed_tokens.weight"][tokens_BT]
    for i in range(config["num_hidden_layers"]):
        layer = of_layer(tensors, i)
        h_BTD = norm(x_BTD, layer["input_layernorm"], config["rms_norm_eps"])
        x_BTD = x_BTD + attention(config, layer, h_BTD)
        h_BTD = norm(x_BTD, layer["post_attention_layernorm"], config["rms_norm_eps"])
        gate_BTM = h_BTD @ layer["mlp.gate_proj"].T
        up_BTM = h_BTD @ layer["mlp.up_proj"].T
        x_BTD = x_BTD + (gate_BTM / (1 + np.exp(-gate_BTM)) * up_BTM) @ layer["mlp.down_proj"].T
    x_BTD = norm(x_BTD, tensors["model.norm.weight"], config["rms_norm_eps"])
    return x_BTD @ tensors["lm_head.weight"].T


def of_layer(tensors, i):
    """The tensors of a layer, without the common parts of their names; biases end in .bias."""
    front = f"model.layers.{i}."
    return {
        name.removeprefix(front).removeprefix("self_attn.").removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if name.startswith(front)
    }


def norm(x, gain, epsilon):
    return gain * x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)


def attention(config, w, x_BTD, *, latent_epsilon=None):
    """[B, T, D].

    Args:
      latent_epsilon: of the norms of latents; None: rms_norm_eps, as in vLLM and SGLang.
    """
    N, C = config["num_attention_heads"], config["kv_lora_rank"]
    H, P, V = (config[f"{key}_head_dim"] for key in ("qk_nope", "qk_rope", "v"))
    epsilon = config["rms_norm_eps"] if latent_epsilon is None else latent_epsilon

    def biased(x_BTX, name):  # transformers' attention_bias
        return x_BTX @ w[name].T + w.get(f"{name}.bias", 0.0)

    assert config["attention_bias"] == ("o_proj.bias" in w)
    if config["q_lora_rank"] is None:
        q_BTX = x_BTD @ w["q_proj"].T
    else:
        q_BTX = norm(biased(x_BTD, "q_a_proj"), w["q_a_layernorm"], epsilon) @ w["q_b_proj"].T
    cached_BTX = biased(x_BTD, "kv_a_proj_with_mqa")
    c_BTC = norm(cached_BTX[..., :C], w["kv_a_layernorm"], epsilon)
    r_BTP = rotate(cached_BTX[..., C:], config["rope_theta"])
    heads_BTX = c_BTC @ w["kv_b_proj"].T
    outputs = []
    for n in range(N):
        q_BTH, q_BTP = np.split(q_BTX[..., n * (H + P) : (n + 1) * (H + P)], [H], axis=-1)
        k_BTH, v_BTV = np.split(heads_BTX[..., n * (H + V) : (n + 1) * (H + V)], [H], axis=-1)
        z_BTS = q_BTH @ k_BTH.swapaxes(1, 2)
        z_BTS = z_BTS + rotate(q_BTP, config["rope_theta"]) @ r_BTP.swapaxes(1, 2)
        z_BTS = np.where(np.tri(z_BTS.shape[1], dtype=bool), z_BTS / np.sqrt(H + P), -np.inf)
        p_BTS = np.exp(z_BTS - z_BTS.max(-1, keepdims=True))
        outputs.append(p_BTS / p_BTS.sum(-1, keepdims=True) @ v_BTV)
    return biased(np.concatenate(outputs, axis=-1), "o_proj")


def rotate(x_BTP, theta):
    """Rotates channels 2i and 2i + 1 of position t by t / theta^(2i/P)."""
    out, P = np.empty_like(x_BTP), x_BTP.shape[-1]
    for i in range(P // 2):
        angle_T = np.arange(x_BTP.shape[1]) * float(theta) ** (-2 * i / P)
        a, b = x_BTP[..., 2 * i], x_BTP[..., 2 * i + 1]
        out[..., 2 * i] = a * np.cos(angle_T) - b * np.sin(angle_T)
        out[..., 2 * i + 1] = b * np.cos(angle_T) + a * np.sin(angle_T)
    return out
