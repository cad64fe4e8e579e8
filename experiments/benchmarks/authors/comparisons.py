"""The list of comparisons: each has an attention module of other authors, and kvjax's equivalent.

Sizes are distinct where the code allows it, so that two swapped axes fail.
"""

from collections.abc import Callable
import dataclasses
import functools

import numpy as np

from experiments.benchmarks.authors import copying
from kvjax.attention import (
    GLAConfig,
    GroupedConfig,
    GTAConfig,
    MLAConfig,
    MLRAConfig,
    SharedKVConfig,
    TPAConfig,
)
from kvjax.attention.mechanism import MechanismConfig
from kvjax.layers.rope import Base, Partial

D, N, H, P, C, CQ = 48, 4, 12, 8, 10, 18  # width, heads, channels: of a head, RoPE key, latents
ROPE = 10_000.0  # base of RoPE
HALF = dict(rope=Partial(ROPE, 0.5))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A class of the authors, and the equivalent kvjax config."""

    peer: str  # see `clones.PEERS`
    title: str
    file: str  # path in the clone, or a module of an installed package
    sizes: dict  # attributes of the authors' config
    config: MechanismConfig
    copy: Callable[[dict, MechanismConfig], dict]  # the authors' weights to ours, see `copying`
    name: str = "CausalSelfAttention"  # the authors' class
    call: str = "module"  # how theirs.py calls it
    extra: dict = dataclasses.field(default_factory=dict)  # further keys of the case
    fixed: dict = dataclasses.field(default_factory=dict)  # constant weights, see `theirs`
    rope: Base | None = ROPE
    window: int = 0
    outcome: str = "equal"  # the expected result of `authors_code.outcome`
    why: str = ""  # the reason, if the outcome is not "equal"

    def case(self, number: int, folder: str) -> dict:
        """Returns the JSON object that theirs.py takes for a case."""
        keys = dict(file=self.file, name=self.name, sizes=self.sizes, call=self.call)
        keys |= dict(id=str(number), seed=number, width=D, folder=folder, fixed=self.fixed)
        return keys | self.extra


# -- configs of kvjax ------------------------------------------------------------------------------

_PLAIN = dict(num_heads=N, qk_norm="none")
_MLA = dict(latent_dim=C, rope_key_dim=P, key_dim=H, value_dim=H, query_rank=CQ)


def _grouped(heads: int = N, **keys) -> GroupedConfig:
    sizes = dict(num_kv_heads=heads, num_bases=heads, rank=0, key_dim=H, value_dim=H)
    return GroupedConfig(**_PLAIN | sizes | keys)


def _tpa(query_factors: int = 3, rank: int = 2) -> TPAConfig:
    sizes = dict(query_factors=query_factors, key_rank=rank, value_rank=rank)
    return TPAConfig(**_PLAIN, **sizes, key_dim=H, value_dim=H)


def _mla(make=MLAConfig, **keys) -> MLAConfig:
    return make(**_PLAIN | _MLA | keys)


def _gta(rope_key_dim: int) -> GTAConfig:
    return GTAConfig(**_PLAIN, num_kv_heads=2, key_dim=H, rope_key_dim=rope_key_dim)


# -- matrices of latents ---------------------------------------------------------------------------


def _latent(count: int, **options):
    """Returns a function that copies weights of MLA, GLA or MLRA, with any of three namings."""

    def ups(weights):
        if "kv_a_layernorm.weight" in weights:
            return [("kv_a_layernorm.weight", weights["kv_b_proj.weight"].T)]
        if "kv_b_proj" in weights:
            stacked = weights["kv_b_proj"]
            return [(f"kv_a_layernorms.{i}.weight", stacked[i]) for i in range(count)]
        names = [(f"kv_a_layernorm_{i}.weight", f"kv_b_proj_{i}.weight") for i in (1, 2)]
        return [(norm, weights[matrix].T) for norm, matrix in names]

    def copy(weights, config):
        return copying.latent(weights, config, ups=ups(weights), **options)

    return copy


def _mlra() -> list[Comparison]:
    """Returns MLRA, and its authors' versions of others' mechanisms."""
    mha = dict(n_embd=D, n_head=N, head_dim=H)
    gqa = mha | dict(group_size=N // 2)
    gated = functools.partial(copying.grouped, gate="c_gated")
    factors = functools.partial(copying.tpa, order=copying.unchanged)
    rows = [
        ("MHA", "mha", mha, _grouped(), copying.grouped, {}),
        ("GQA", "gqa", gqa, _grouped(2), copying.grouped, {}),
        ("MQA", "gqa", mha | dict(group_size=N), _grouped(1), copying.grouped, {}),
        ("GQA, gated", "gqa_gated", gqa, _grouped(2, output_gate=True), gated, {}),
        ("MFA", "mfa", mha | dict(share_q_dim=CQ), _grouped(1, query_rank=CQ), copying.mfa, {}),
        ("GTA", "gta", gqa, _gta(H // 2), copying.gta, {}),
        ("TPA", "tpa", mha | dict(rank=2, q_rank=3), _tpa(), factors, {}),
    ]
    sizes = dict(n_embd=D, n_head=N, q_lora_rank=CQ, qk_rope_head_dim=P, qk_nope_head_dim=H)
    for title, file, count, make, keys in (
        ("MLA", "mla", 1, MLAConfig, {}),
        ("GLA-2", "gla_2", 2, GLAConfig, dict(num_latents=2)),
        ("GLA-4", "gla_4", 4, GLAConfig, dict(num_latents=4)),
        ("MLRA-2", "mlra_2", 4, MLRAConfig, dict(num_branches=2, num_latents=2)),
        ("MLRA-4", "mlra_4", 4, MLRAConfig, dict(num_branches=4, num_latents=1)),
    ):
        latent_sizes = sizes | dict(kv_lora_rank=count * C)
        scaled = _mla(make, **keys, latent_scale=True)
        rows.append((title, file, latent_sizes, scaled, _latent(count), {}))
        if file != "gla_4":
            gate = dataclasses.replace(scaled, output_gate=True)
            copy = _latent(count, gate="gated_proj")
            rows.append((f"{title}, gated", f"{file}_gated", latent_sizes, gate, copy, {}))
        if not file.endswith("4"):
            # MLRA-2 without scales also sums its branches without the factor 2**-0.5.
            copy = _latent(count, scale=2**0.5 if file == "mlra_2" else 1.0)
            plain = dataclasses.replace(scaled, latent_scale=False)
            rows.append((f"{title}, no scales", f"{file}_no_scale", latent_sizes, plain, copy, {}))
        if file.startswith("mlra"):
            name, gen_file = f"{title}, for generation", f"{file}_gen"
            call = dict(call="generator")
            equal_dims = dataclasses.replace(scaled, latent_dim=H)
            equal_sizes = latent_sizes | dict(kv_lora_rank=count * H)
            row = (f"{name}, C = H", gen_file, equal_sizes, equal_dims, _latent(count), call)
            rows.append(row)
            why = "FlashAttention's default scale counts C channels of a latent, not H of a key"
            differs = call | dict(outcome="differs", why=why)
            rows.append((name, gen_file, latent_sizes, scaled, _latent(count), differs))
    return [
        Comparison("MLRA", title, f"model/{file}.py", *arguments, **options)
        for title, file, *arguments, options in rows
    ]


def _tpa_authors() -> list[Comparison]:
    """Returns TPA, and its authors' versions of others' mechanisms."""
    heads, half = dict(n_embd=D, n_head=N, head_dim=H), H // 2
    groups, partial = dict(group_size=N // 2), dict(rope_partial_factor=0.5)
    factors = heads | dict(rank=2, q_rank=3)
    order = functools.partial(copying.partial_backwards, rotated=half)
    copy_half = functools.partial(copying.grouped, order=order)
    tpa_half = functools.partial(copying.tpa, order=order)
    grouped = functools.partial(copying.grouped, order=copying.backwards)
    latent = dict(q_lora_rank=CQ, kv_lora_rank=C, qk_rope_head_dim=P, v_head_dim=H + 2)
    inference = dict(n_heads=N, n_kv_heads=None, dim=D, head_dim=H, q_rank=3, rank=2)
    inference |= dict(max_batch_size=2, max_seq_len=24)
    unusable = dict(name="TPA", outcome="raises", why="it reads self.n_embd, which nothing sets")
    decoding = dict(call="tpa_decoding")
    wide = _mla(value_dim=H + 2)
    rows = [
        ("TPA", "T6", factors, _tpa(), copying.tpa, {}),
        ("TPA, RoPE last", "T6_ropek", factors, _tpa(), copying.tpa, {}),
        ("TPA, half RoPE", "T6_partialrope", factors | partial, _tpa(), tpa_half, HALF),
        ("KV-only TPA", "T6_kvonly", factors, _tpa(0), copying.tpa, {}),
        ("KV-only TPA, RoPE last", "T6_kvonly_ropek", factors, _tpa(0), copying.tpa, {}),
        (
            "KV-only TPA, half RoPE",
            "T6_kvonly_partialrope",
            factors | partial,
            _tpa(0),
            tpa_half,
            HALF,
        ),
        ("TPA, rank 1", "T6", factors | dict(rank=1), _tpa(rank=1), copying.tpa, decoding),
        ("TPA, for inference", "T6_infer", inference, _tpa(), copying.tpa, unusable),
        ("TPA, the same, RoPE last", "T6_infer_ropek", inference, _tpa(), copying.tpa, unusable),
        ("MHA", "llama-mha", heads, _grouped(), grouped, {}),
        ("MHA, half RoPE", "llama-mha-partialrope", heads | partial, _grouped(), copy_half, HALF),
        ("GQA", "llama-gqa", heads | groups, _grouped(2), grouped, {}),
        (
            *("GQA, half RoPE", "llama-gqa-partialrope", heads | groups | partial),
            *(_grouped(2), copy_half, HALF),
        ),
        ("MQA", "llama-gqa", heads | dict(group_size=N), _grouped(1), grouped, {}),
        ("MLA", "llama-mla", heads | latent, wide, _latent(1, order=copying.backwards), {}),
    ]
    without_norm = dict(using_groupnorm=False)
    return [
        Comparison("TPA", title, f"model/{file}.py", sizes | without_norm, *arguments, **options)
        for title, file, sizes, *arguments, options in rows
    ]


def _gla_authors() -> list[Comparison]:
    """Returns GLA and GTA, with and without the biases of their projections."""
    sizes = dict(attention_dropout=0.0, hidden_size=D, num_attention_heads=N, head_dim=H)
    sizes |= dict(max_position_embeddings=64, rope_theta=ROPE, rope_scaling=None)
    sizes |= dict(rms_norm_eps=1e-6, attention_bias=False, num_key_value_heads=2)
    names = dict(q_a_proj="W_dQ", q_a_layernorm="q_norm", q_b_proj="W_uQ_rope", c_proj="o_proj")
    names |= dict(kv_a_proj_with_mqa="W_dKV", kv_a_layernorm_1="kv_norm_1")
    names |= dict(kv_a_layernorm_2="kv_norm_2", kv_b_proj_1="W_ukv_1", kv_b_proj_2="W_ukv_2")

    def gla(weights, config):
        renamed = {
            f"{deepseek_name}.weight": weights[f"{authors_name}.weight"]
            for deepseek_name, authors_name in names.items()
        }
        return _latent(2)(renamed, config)

    gta = functools.partial(copying.gta, names="q_proj o_proj")
    latents = _mla(GLAConfig, num_latents=2, latent_dim=2 * H, query_rank=8 * H)
    comparisons = []
    for title, name, rope_sizes, config, copy in (
        ("GLA-2", "GLA", dict(qk_rope_dim=P), latents, gla),
        ("GTA", "GTA", dict(rope_dim=P), _gta(P), gta),
    ):
        shared = dict(file=f"modeling_llama_{name}.py", name=f"LlamaFlash{name}", call="llama")
        shared |= dict(sizes=sizes | rope_sizes, config=config, copy=copy, extra=dict(rope_dim=P))
        make = functools.partial(Comparison, "grouped-latent-attention", **shared)
        why = "transformers' caches join along the axis before the last, which is heads here"
        raises = dict(outcome="equal, its cache raises", why=why)
        comparisons.append(make(f"{title}, biases 0", fixed=dict(bias=0.0), **raises))
        why = f"kvjax has no biases on these projections; {why}"
        raises = dict(outcome="differs, its cache raises", why=why)
        comparisons.append(make(f"{title}, biases", **raises))
    return comparisons


def _projection_sharing() -> list[Comparison]:
    """Returns the three shared projections and their baselines, at one or both scales."""
    sizes = dict(n_embd=D, n_head=N, attn_pdrop=0.0, resid_pdrop=0.0, use_bias=True)
    sizes |= dict(n_positions=32, use_flash_attention=False)

    def copy(names, fused="", parts=""):
        def copy_weights(weights, config):
            weights = copying.split_fused(weights, fused, parts) if fused else weights
            return copying.grouped(weights, config, names=names)

        return copy_weights

    all_three = copy("c_q c_k c_v c_proj", "c_attn", "c_q c_k c_v")
    fused = copy("c_q c_k c_v c_proj", "c_kv", "c_k c_v")
    tied = copy("c_q c_k - c_proj")
    comparisons = []
    for title, file, name, heads, tie, copy_weights, only_small in (
        ("QKV", "KQV", "QKVAttention", N, "none", all_three, False),
        ("Q-K=V", "KV_1", "QKVAttention_KEqualsV", N, "kv", tied, False),
        ("Q=K-V", "QK", "KVAttention", N, "qk", copy("- c_k c_v c_proj", "c_kv", "c_k c_v"), True),
        ("Q=K=V", "K", "KAttention", N, "qkv", copy("- c_k - c_proj"), True),
        ("GQA", "GQA", "GQAttention", 2, "none", fused, False),
        ("MQA", "MQA", "MQAttention", 1, "none", fused, False),
        ("Q-GQA", "QGQA", "QGQAttention", 2, "kv", tied, False),
        ("Q-MQA", "QMQA", "QMQAttention", 1, "kv", copy("c_q c_kv - c_proj"), False),
    ):
        for scale in ("300_M",) if only_small else ("300_M", "1_2B"):
            with_groups = sizes | dict(n_kv_groups=heads)
            config = _grouped(heads, tie=tie, bias=True)
            shared = dict(sizes=with_groups, config=config, copy=copy_weights)
            shared |= dict(name=name, rope=None)
            label = f"{title}, {scale.replace('_M', 'M').replace('_', '.')}"
            path = f"transformer_{file}_{scale}.py"
            peer = "Do-Transformers-Need-3-Projections"
            comparisons.append(Comparison(peer, label, path, **shared))
    return comparisons


def _nanochat() -> list[Comparison]:
    """Returns MHA, GQA and MQA with QK-norm; PyTorch's epsilon is the dtype's."""
    normed = dict(qk_norm="rms", norm_epsilon=float(np.finfo(np.float64).eps))
    copy = functools.partial(copying.grouped, order=copying.backwards)
    comparisons = []
    for title, heads in (("MHA, QK-norm", N), ("GQA, QK-norm", 2), ("MQA, QK-norm", 1)):
        sizes, config = dict(n_head=N, n_kv_head=heads, n_embd=D), _grouped(heads, **normed)
        module = ("nanochat", title, "nanochat/gpt.py")
        comparisons.append(Comparison(*module, sizes, config, copy, call="nanochat"))
    return comparisons


def _deepseek() -> list[Comparison]:
    """Returns DeepSeek's attention modules of transformers."""
    module = "transformers.models.deepseek_v{0}.modeling_deepseek_v{0}"
    sizes = dict(hidden_size=D, num_attention_heads=N, num_key_value_heads=N, kv_lora_rank=C)
    sizes |= dict(qk_rope_head_dim=P, qk_nope_head_dim=H, v_head_dim=H + 2)
    sizes |= dict(rope_parameters=dict(rope_type="default", rope_theta=ROPE))
    pairs = _latent(1, order=copying.interleaved, output="o_proj")
    halves = _latent(1, output="o_proj")
    config, dense = _mla(value_dim=H + 2), _mla(value_dim=H + 2, query_rank=0)
    low_rank, no_rank = dict(q_lora_rank=CQ), dict(q_lora_rank=None)
    halved = dict(rope_interleave=False)
    v4_sizes = dict(hidden_size=D, num_hidden_layers=1, num_attention_heads=N, head_dim=H)
    v4_sizes |= dict(q_lora_rank=CQ, o_groups=2, o_lora_rank=7, partial_rotary_factor=P / H)
    v4_sizes |= dict(layer_types=["sliding_attention"], n_routed_experts=4, rope_theta=ROPE)
    normed = dict(qk_norm="rms_gain", query_rank=CQ)
    shared = SharedKVConfig(num_heads=N, num_kv_heads=1, key_dim=H, rope_key_dim=P, **normed)
    v4 = functools.partial(copying.deepseek_v4, groups=2)
    rows = [
        (2, "MLA", sizes | low_rank, config, pairs, 0),
        (2, "MLA, dense queries", sizes | no_rank, dense, pairs, 0),
        (3, "MLA", sizes | low_rank, config, pairs, 0),
        (3, "MLA, dense queries", sizes | no_rank, dense, pairs, 0),
        (3, "MLA, pairs (i, i + P/2)", sizes | low_rank | halved, config, halves, 0),
        (4, "shared KV, no sinks", v4_sizes, shared, v4, 0),
        (4, "shared KV, no sinks, window 7", v4_sizes, shared, v4, 7),
    ]
    comparisons = []
    for version, title, all_sizes, config, copy, window in rows:
        family = f"DeepseekV{version}"
        options = dict(name=f"{family}Attention", call="transformers", window=window)
        options |= dict(extra=dict(family=family, window=window))
        if version == 4:
            options |= dict(fixed=dict(sinks=-np.inf))
        file, title = module.format(version), f"V{version} {title}"
        comparisons.append(
            Comparison("transformers", title, file, all_sizes, config, copy, **options)
        )
    return comparisons


ALL = (
    *_mlra(),
    *_tpa_authors(),
    *_gla_authors(),
    *_projection_sharing(),
    *_nanochat(),
    *_deepseek(),
)
