"""Definitions of the studies at demo size: each has a question, and cells of config and overrides.

`experiments.studies.language_models` trains them.
"""

from collections.abc import Callable
import dataclasses
import pathlib

from experiments.studies import grid
from experiments.studies.grid import Cell
from kvjax import config as config_lib, recipes
from kvjax.costs import formulas
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import config_label, load_config

TOKENS_PER_STEP = 32 * 256  # of the tiny configs; with longer rows a step has fewer rows
UNIFORM = "lrkv_uniform"  # the cell with one rank for all layers
PER_HEAD = {"optimizer.orthogonalize": "per_head"}


def tiny(name: str) -> pathlib.Path:
    """Returns the tiny config of a mechanism, or of a variant in configs/rivals.py."""
    return CONFIGS / (f"{name}_tiny" if ".py:" in name else f"{name}_tiny.py")


@dataclasses.dataclass(frozen=True)
class Study:
    """A question and the runs that answer it, all with the same number of steps.

    Attributes:
      asks: the question.
      claim: the paper's claim, with its table or section.
      steps: training steps of 8,192 tokens each.
    """

    asks: str
    claim: str
    cells: Callable[[], list[Cell]]
    steps: int = 128


def _of(name: str, config: str, against: str = "", **overrides) -> Cell:
    """Returns a cell of a tiny config with overrides of its section `attention`."""
    return Cell(name, tiny(config), {f"attention.{k}": v for k, v in overrides.items()}, against)


def _with(cell: Cell, suffix: str, against: str, **overrides) -> Cell:
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    return Cell(f"{cell.name}{suffix}", cell.config, dict(cell.overrides) | keys, against)


def _ranks() -> list[Cell]:
    """Returns MHA, and LRKV of several ranks in heads of 32 channels; rank 0 is MQA."""
    ranks = (0, 2, 4, 8, 16, 24, 32)
    lrkv = [_of(f"lrkv_r{rank}", "lrkv", "mha", rank=rank) for rank in ranks]
    return [_of("mha", "mha"), *lrkv]


def _widths() -> list[Cell]:
    """Returns widths from 64 to 256, heads of 32, and half a head's channels as rank."""
    cells = []
    for width in (64, 128, 256):
        heads = width // 32
        shape = dict(model__d_model=width, model__mlp_dim=4 * width)
        shape |= dict(attention__num_heads=heads, attention__num_kv_heads=heads)
        mha, lrkv = _of("mha", "mha"), _of("lrkv", "lrkv")
        against = f"mha_d{width}"
        cells.append(_with(mha, f"_d{width}", "", **shape, attention__num_bases=heads))
        cells.append(_with(lrkv, f"_d{width}", against, **shape))
    return cells


def _starts() -> list[Cell]:
    """Returns changes of initialisation, Muon grouping, gate and heads, for several mechanisms."""
    mha, lrkv = _of("mha", "mha"), _of("lrkv", "lrkv", "mha")
    zeros = _of("lrkv_zero_residuals", "lrkv", "lrkv", residual_init="zeros")
    nearest = _of("lrkv_nearest_to_mha", "lrkv", "lrkv", residual_init="pca")
    changes = {
        "per_head": PER_HEAD,
        "normal_0.02": {"model.matrix_std": 0.02},
        "outputs_drawn": {"model.zero_outputs": False},
        "gated": {"attention.output_gate": True},
        "8_heads": {"attention.num_heads": 8, "attention.num_kv_heads": 8},
    }
    changed = []
    for name, keys in changes.items():
        more = {"attention.num_bases": 8} if name == "8_heads" else {}
        changed += [
            Cell(f"mha_{name}", tiny("mha"), keys | more, "mha"),
            Cell(f"lrkv_{name}", tiny("lrkv"), keys, f"mha_{name}", "lrkv"),
        ]
    latent = [_of("mla", "mla", "mha"), _of("mla_scaled", "mla", "mla", latent_scale=True)]
    return [mha, lrkv, zeros, nearest, *changed, *latent, *_rivals_starts()]


def _rivals_starts() -> list[Cell]:
    """Returns rivals with MHA's parameter count; MHA with the same change is the reference."""
    parameters = formulas.parameters(config_lib.resolve(load_config(tiny("mha"))).model)["total"]
    changes = {
        "": {},
        "_per_head": PER_HEAD,
        "_normal_0.02": {"model.matrix_std": 0.02},
        "_gated": {"attention.output_gate": True},
    }
    cells = []
    for name in ("mla", "gqa", *(f"rivals.py:{name}_narrow" for name in ("gta", "mfa", "tpa"))):
        config = tiny(name)
        mlp_width = grid.matched(config, parameters)
        label = f"{config_label(config).removesuffix('_tiny')}_matched"
        cells += [
            Cell(label + suffix, config, mlp_width | keys, f"mha{suffix}", label if suffix else "")
            for suffix, keys in changes.items()
        ]
    return cells


def _positions() -> list[Cell]:
    """Returns RoPE on all channels and on a quarter, learned positions, none, and ALiBi."""
    cells = []
    for name in ("mha", "lrkv"):
        is_reference = name == "mha"
        plain = _of(name, name, "" if is_reference else "mha")
        cells.append(plain)
        for suffix, keys in {
            "_quarter_rope": dict(model__rope_fraction=0.25),
            "_learned": dict(model__positions="learned", model__embedding_std=0.02),
            "_no_positions": dict(model__positions="none"),
            "_alibi": dict(model__positions="none", attention__alibi=True),
        }.items():
            cells.append(_with(plain, suffix, "" if is_reference else f"mha{suffix}", **keys))
    shared = _of("lrkv_shared_rope", "lrkv", "lrkv", rope="shared")
    return [*cells, shared]


def _mechanisms() -> list[Cell]:
    """Returns the LRKV paper's six mechanisms by their tiny configs."""
    others = ("lrkv", "gqa", "mla", "mqa", "mla_paper")
    return [_of("mha", "mha"), *(_of(name, name, "mha") for name in others)]


def _equal() -> list[Cell]:
    """Returns mechanisms with MHA's parameters (by MLP width), and LRKV with GQA's cache bytes."""
    count = formulas.parameters(config_lib.resolve(load_config(tiny("mha"))).model)["total"]

    def wide(name):
        return Cell(f"{name}_matched", tiny(name), grid.matched(tiny(name), count), "mha")

    return [
        _of("mha", "mha"),
        *(wide(name) for name in ("lrkv", "gqa", "mqa", "mla")),
        _of("gqa", "gqa", "mha"),
        # GQA caches 2·2·32 elements, LRKV of rank 7 2·(32 + 4·7), and 4 float32 values of 1/rms.
        _of("lrkv_r7", "lrkv", "gqa", rank=7),
    ]


def _layer_ranks() -> list[Cell]:
    """Returns ranks by layer with equal bytes, listed from the first layer to the last."""
    ranks = {
        "rising": (8, 16, 16, 24),
        "falling": (24, 16, 16, 8),
        "outer": (24, 8, 8, 24),
        "inner": (8, 24, 24, 8),
    }
    uneven = [_of(f"lrkv_{name}", "lrkv", UNIFORM, layer_ranks=r) for name, r in ranks.items()]
    return [_of(UNIFORM, "lrkv"), *uneven]


_VANILLA = {
    "model__positions": "learned",
    "model__norm": "layer",
    "model__norm_gain": True,
    "model__norm_bias": True,
    "model__activation": "gelu_exact",
    "model__embedding_norm": False,
    "model__bias": True,
    "model__logit_softcap": 0.0,
    "model__tied_head": True,
    "model__embedding_std": 0.02,
    "model__matrix_std": 0.02,
    "model__zero_outputs": False,
    "attention__qk_norm": "none",
    "attention__bias": True,
    "model__norm_epsilon": 1e-5,
    "model__dropout": 0.1,
}
_LLAMA = _VANILLA | {
    "model__positions": "rope",
    "model__norm": "rms",
    "model__norm_bias": False,
    "model__activation": "swiglu",
    "model__bias": False,
    "attention__bias": False,
    "model__mlp_dim": 344,
    "model__norm_epsilon": 1e-6,
    "model__dropout": 0.0,
}


def _adamw(rate: float, width: int, **keys) -> dict:
    """Returns overrides of AdamW with a short warmup: 10 of 128 steps."""
    optimizer = recipes.adamw(rate, width, warmup_steps=10, **keys)
    return {f"optimizer__{key}": value for key, value in optimizer.items()}


def _key_dims() -> list[Cell]:
    """Returns d_select of 8 to 128 in thin keys' two styles (vanilla and Llama, 3.3 to 3.6)."""
    cells = []
    llama = dict(adam_b2=0.95, final_fraction=0.1, weight_decay=0.1)
    for style, keys, optimizer, dims in (
        ("vanilla", _VANILLA, dict(weight_decay=0.01), (8, 16, 32, 64, 128)),
        ("llama", _LLAMA, llama, (8, 16, 32, 128)),
    ):
        recipe = _adamw(3e-3, 128, **optimizer)
        for dim in dims:
            plain = _of("thin", "mha", key_dim=dim // 4)
            against = "" if dim == 128 else f"{style}_d128"
            cell = _with(plain, "", against, **keys, **recipe)
            cells.append(dataclasses.replace(cell, name=f"{style}_d{dim}"))
    return cells


def _projections() -> list[Cell]:
    """Returns the variants of projection sharing's Tables 4 and 10, at two widths."""
    cells = []
    configs = ("mha", "kv_tied", "qk_tied", "qk_tied_plus", "qkv_tied", "qkv_tied_plus", "gqa")
    configs += ("mqa", "kv_tied_gqa", "kv_tied_mqa")
    decay = dict(weight_decay=0.1, final_fraction=0.1)
    for width in (64, 128):
        shape = dict(model__d_model=width, model__mlp_dim=4 * width)
        shape |= dict(attention__key_dim=width // 4, attention__value_dim=width // 4)
        recipe = _VANILLA | _adamw(2e-3, width, adam_b2=0.95, **decay)
        for config in configs:
            against = "" if config == "mha" else f"qkv_d{width}"
            cell = _with(_of(config, config), "", against, **shape, **recipe)
            name = "qkv" if config == "mha" else config
            cells.append(dataclasses.replace(cell, name=f"{name}_d{width}"))
    return cells


STUDIES = {
    "mechanisms": Study(
        "What do six mechanisms lose with what they do not cache?",
        "LRKV table 2: at 2.5B LRKV .719 bits per byte, MHA .723, GQA .725, MLA .724, MQA .729",
        _mechanisms,
    ),
    "lrkv_ranks": Study(
        "How does the loss depend on the residuals' rank?",
        "LRKV table 2: at 128M r = 64 reaches .872 bits per byte (.875 in the text), r = 16 .881",
        _ranks,
    ),
    "lrkv_widths": Study(
        "Does the gap between LRKV and MHA grow with the width?",
        "LRKV table 2: -0.006 bits per byte at 128M (-0.003 by its text) and -0.004 at 2.5B",
        _widths,
    ),
    "lrkv_starts": Study(
        "Which conclusions change with initialisation, gate, heads, or what Muon sees?",
        "LRKV and its rivals are compared under one recipe; the papers vary none of these",
        _starts,
    ),
    "lrkv_equal": Study(
        "Does LRKV lead at equal parameters, and at equal cache bytes?",
        "LRKV table 2 compares models of other sizes",
        _equal,
    ),
    "lrkv_layer_ranks": Study(
        "Where is rank worth most, at equal bytes?", "LRKV future work 1", _layer_ranks
    ),
    "lrkv_positions": Study(
        "Does LRKV depend on how positions are told?",
        "LRKV future work 3; equation 3 is exact without RoPE alone",
        _positions,
    ),
    "thin_keys_key_dims": Study(
        "How thin may queries and keys be in a language model?",
        "Thin keys, section 3.4: +4.3 % perplexity at d/4 on WikiText-103",
        _key_dims,
    ),
    "projection_sharing_models": Study(
        "Which projections may be shared in a language model?",
        "Projection sharing table 4: Q-K=V +3.1 %, Q=K-V +4.9 %, Q=K=V +25 % perplexity",
        _projections,
    ),
}
