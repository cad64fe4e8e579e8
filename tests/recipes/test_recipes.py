"""Recipes: the keys in which each differs from defaults, or from another recipe."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from kvjax import config as config_lib, optim, recipes
from kvjax.attention import MECHANISMS
from kvjax.config import ComputeConfig, TrainConfig
from kvjax.data.config import DataConfig
from kvjax.foundation.errors import UserError
from kvjax.model import parameters
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.optim import OptimizerConfig

D = 12


def _changed(section, base):
    """Keys of a section with other values than those of a base, a config or another section."""
    base = dataclasses.asdict(base) if dataclasses.is_dataclass(base) else dict(base)
    return {key: value for key, value in section.items() if value != base.get(key)}


def _changes(config, base):
    """Returns the changed keys by section."""
    sections = config.to_dict().items()
    found = {key: _changed(of, base.get(key, {})) for key, of in sections if key != "name"}
    return {key: changed for key, changed in found.items() if changed}


def test_optimizers():
    plain = dict(adam_b1=0.9, adam_b2=0.999, adam_epsilon=1e-8, matrices="adamw")
    rates = ("matrix_learning_rate", "vector_learning_rate")
    wide = ("embedding_learning_rate", "head_learning_rate")
    cases = [
        (recipes.nanochat(), {}),
        (
            recipes.paper_text(),
            dict(adam_b1=0.9, matrix_weight_decay=0.1, adam_weight_decay=0.1)
            | dict(schedule="cosine", warmup_steps=1000),
        ),
        (
            recipes.tuning(),
            plain | dict.fromkeys((*rates, *wide), 5e-5)
            # As PyTorch has it: decay 0.01, constant to the end.
            | dict(matrix_weight_decay=0.01, adam_weight_decay=0.01, cooldown_fraction=0.0),
        ),
        (
            recipes.adamw(3.0, 768 * 4, weight_decay=0.3, warmup_steps=7),
            plain | dict.fromkeys(rates, 3.0) | dict.fromkeys(wide, 6.0) | dict(warmup_steps=7)
            | dict(matrix_weight_decay=0.3, adam_weight_decay=0.3, schedule="cosine"),
        ),
    ]  # fmt: skip
    for section, expected in cases:
        assert _changed(section, OptimizerConfig()) == expected
    assert set(recipes.PRESETS) == {"nanochat", "paper_text", "tuning"}
    for name, preset in recipes.PRESETS.items():
        assert preset() == getattr(recipes, name)()


def test_mechanisms():
    """Each with no more than it must be given, and with all that it can be."""
    heads = dict(num_heads=6)
    dims, wide = dict(key_dim=128, value_dim=128), dict(key_dim=256, value_dim=256)
    latent = dict(latent_dim=9, rope_key_dim=64, **heads)

    def grouped(kv_heads, bases, rank=0, **more):
        shape = dict(num_kv_heads=kv_heads, num_bases=bases, rank=rank)
        return heads | dims | shape | more

    cases = [
        ("grouped", recipes.mha(6), grouped(6, 6)),
        ("grouped", recipes.mha(6, head_dim=7), grouped(6, 6, key_dim=7, value_dim=7)),
        ("grouped", recipes.gqa(6, kv_heads=3), grouped(3, 3)),
        ("grouped", recipes.mqa(6), grouped(1, 1)),
        ("grouped", recipes.mqa(6, head_dim=7), grouped(1, 1, key_dim=7, value_dim=7)),
        ("grouped", recipes.lrkv(6, rank=5), grouped(6, 1, 5)),
        ("grouped", recipes.thin_keys(6, key_dim=7), grouped(6, 6, key_dim=7)),
        ("grouped", recipes.thin_keys(6, key_dim=7, kv_heads=2), grouped(2, 2, key_dim=7)),
        ("grouped", recipes.projection_sharing(6, tie="kv"), grouped(6, 6, tie="kv")),
        (
            "grouped",
            recipes.projection_sharing(6, tie="kv", kv_heads=2),
            grouped(2, 2, tie="kv"),
        ),
        (
            "grouped",
            recipes.projection_sharing(6, tie="qk", channels=8, head_dim=10),
            grouped(6, 6, tie="qk", position_channels=8, key_dim=10, value_dim=10),
        ),
        ("grouped", recipes.without_qk_norm(recipes.mqa(6)), grouped(1, 1, qk_norm="none")),
        (
            "grouped",
            recipes.without_qk_norm(recipes.mqa(6), bias=True),
            grouped(1, 1, qk_norm="none", bias=True),
        ),
        ("mla", recipes.mla(6, latent=9), latent | dims),
        ("mla_lrkv", recipes.mla_lrkv(6, latent=9, rank=5), latent | dims | dict(rank=5)),
        ("mla_paper", recipes.mla_paper(6, latent=9), heads | dims | dict(latent_dim=9)),
        (
            "factored",
            recipes.factored(6, kv_heads=3, latents=1, key_rank=5),
            heads | dims | dict(num_kv_heads=3, num_latents=1, key_rank=5, value_rank=0),
        ),
        ("grouped", recipes.mfa(6, query_rank=5), grouped(1, 1, query_rank=5, **wide)),
        (
            "mfa_kr",
            recipes.mfa_kr(6, query_rank=5),
            heads | dict(query_rank=5, num_kv_heads=1, key_dim=256),
        ),
        ("gla", recipes.gla(6, latents=2, latent=9), latent | dims | dict(num_latents=2)),
        (
            "gla",
            recipes.gla(6, latents=3, latent=9, query_rank=5, rope_dim=4, head_dim=7),
            latent
            | dict(num_latents=3, query_rank=5, rope_key_dim=4, key_dim=7, value_dim=7),
        ),
        *(
            (
                "mlra",
                recipes.mlra(8, branches=branches, latent=9),
                latent | dims | dict(num_heads=8, num_latents=4 // branches, num_branches=branches),
            )
            for branches in (1, 2, 4)
        ),
        (
            "gta",
            recipes.gta(6, kv_heads=3, head_dim=12),
            heads | dict(num_kv_heads=3, key_dim=12, rope_key_dim=6),
        ),
        (
            "gta",
            recipes.gta(6, kv_heads=3, rope_dim=0),
            heads | dict(num_kv_heads=3, key_dim=128, rope_key_dim=0),
        ),
        (
            "shared_kv",
            recipes.shared_kv(6, kv_heads=3),
            heads | dict(num_kv_heads=3, key_dim=256, rope_key_dim=64),
        ),
        (
            "tpa",
            recipes.tpa(6, key_rank=2, value_rank=5),
            heads | dims | dict(key_rank=2, value_rank=5, query_factors=6),
        ),
    ]  # fmt: skip
    for kind, section, expected in cases:
        fields = dataclasses.fields(MECHANISMS[kind])
        base = {field.name: field.default for field in fields}
        base |= dict(kind=kind, layer_ranks=())
        changed = _changed(section, base)
        required = {f.name for f in fields if f.default is dataclasses.MISSING}
        optional = {key: value for key, value in expected.items() if value != base[key]}
        assert required <= expected.keys() and changed == optional, section
        assert ("layer_ranks" in section) == (kind in ("grouped", "factored"))
        assert section.keys() - {"kind", "layer_ranks"} == {field.name for field in fields}
    with pytest.raises(UserError, match="branches = 3: must be 1, 2 or 4 .they share four latents"):
        recipes.mlra(6, branches=3, latent=9)


def test_adamw_has_one_rate_at_any_width(make_mechanism):
    """A first step of Adam is as long as its rate, whatever the gradient."""
    shapes, axes = parameters.abstract(_model(make_mechanism))
    keys = recipes.adamw(1e-3, D, weight_decay=0.0, warmup_steps=0, clip_norm=0.0)
    optimizer = optim.make_optimizer(OptimizerConfig(**keys), axes, d_model=D, num_steps=100)
    ones = jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes)
    updates = jax.jit(lambda x: optimizer.update(x, optimizer.init(x), x)[0])(ones)
    lengths = {float(np.abs(leaf).max()) for leaf in jax.tree.leaves(updates)}
    assert max(lengths) == pytest.approx(1e-3, rel=1e-3)
    assert min(lengths) == pytest.approx(max(lengths), rel=1e-3)


def _model(make_mechanism, name="lrkv"):
    block = dict(num_layers=1, d_model=D, mlp_dim=20, norm="layer", norm_gain=True)
    return TransformerConfig(
        block=BlockConfig(**block), mechanisms=(make_mechanism(name),), vocab_size=10
    )


def test_queries_for_ropes_key_are_tuned_with_it(make_mechanism):
    shapes = parameters.abstract(_model(make_mechanism, "mla")).shapes
    tuned = optim.trainable(OptimizerConfig(tuned=recipes.TUNED["qk"]), shapes)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tuned)]
    for name in ("rope_query", "rope_key"):
        assert any(name in path for path in paths), name


def test_what_is_tuned_is_of_attention_alone(make_mechanism):
    shapes = parameters.abstract(_model(make_mechanism)).shapes
    of_keys = {"query", "base_key", "latent_key", "expand_key"}
    of_values = {"base_value", "latent_value", "expand_value"}
    cases = dict(qk=of_keys, qkv=of_keys | of_values, attention=of_keys | of_values | {"out"})
    assert recipes.TUNED.keys() == cases.keys()
    for tune, names in cases.items():
        tuned = optim.trainable(OptimizerConfig(tuned=recipes.TUNED[tune]), shapes)
        found = {
            tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path)[2:]
            for path, _ in jax.tree_util.tree_leaves_with_path(tuned)
        }
        assert found == {
            ("attention", "out") if name == "out" else ("attention", "mechanism", name)
            for name in names
        }


def test_runs_on_conversations():
    """nanochat's: 20,843 conversations in chat_sft, 32 a step, rates times 0.02, linear to 0."""
    attention = recipes.mha(6)
    named = dict(scale="300m", attention=attention)  # with 64 rows in a part
    before = recipes.pretrain("x", **named)
    middle = recipes.mid_train("mid/x", **named, train=dict(log_every=77))
    after = recipes.chat_sft("sft/x", **named, train=dict(log_every=78))
    assert (middle.name, after.name) == ("mid/x", "sft/x")
    smoltalk, gsm8k = "~/data/smol-smoltalk/data", "~/data/gsm8k/main"
    changes = _changes(middle, before)
    assert changes["mixture"] == middle.mixture.to_dict()
    assert changes | dict(mixture={}) == dict(
        train=dict(
            parent="runs/x", num_steps=0, batch_size=256, grad_accumulation=4, eval_every=150,
            eval_rows=5120, checkpoint_every=150, keep_checkpoints=2, sample_tokens=0, log_every=77,
        ),
        data=dict(source="mixture", tokenizer="parent"),
        optimizer=dict(clip_norm=0.0),
        mixture={},
    )  # fmt: skip
    told = {key: value for key, value in middle.mixture.items() if "/" in str(value)}
    assert told == dict(
        smoltalk=f"{smoltalk}/train-*.parquet",
        mmlu="~/data/mmlu/auxiliary_train/train-*.parquet",
        gsm8k=f"{gsm8k}/train-*.parquet",
        validation_smoltalk=f"{smoltalk}/test-*.parquet",
        validation_mmlu="~/data/mmlu/all/test-*.parquet#0:5200",
        validation_gsm8k=f"{gsm8k}/test-*.parquet#0:420",
    )
    arc = "~/data/ai2_arc/ARC-{}/train-*.parquet"
    assert _changes(after, middle) == dict(
        train=dict(
            parent="runs/mid/x", batch_size=32, grad_accumulation=1, eval_every=100, eval_rows=0,
            checkpoint_every=100, log_every=78,
        ),
        optimizer=dict(lr_scale=0.02, schedule="linear", momentum_warmup_steps=0),
        mixture=dict(
            arc=f"{arc.format('Easy')}, {arc.format('Challenge')}", mmlu="",
            smoltalk=f"{smoltalk}/train-*.parquet#0:10000", validation_mmlu="",
            validation_smoltalk=f"{smoltalk}/test-*.parquet#0:1000", validation_gsm8k="",
            order=("arc", "gsm8k", "smoltalk", "mmlu", "conversations"),
            loss="assistant", pack="single",
        ),
    )  # fmt: skip
    run = config_lib.resolve(after)
    parts = [(part.kind, part.stop) for part in run.mixture.specs("train")]
    assert parts == [("arc", None), ("arc", None), ("gsm8k", None), ("smoltalk", 10_000)]
    assert run.is_masked and run.model == config_lib.resolve(middle).model
    tiny = recipes.mid_train("x", scale="125m", attention=attention)  # rows of 512, 64 in one part
    assert _changes(tiny, before)["train"]["grad_accumulation"] == 4
    assert tiny.data.sequence_length == 2048


def test_recovery(tmp_path):
    there = dict(model=dict(a=1), attention=dict(b=2), data=dict(vocab_size=7, sequence_length=3))
    (tmp_path / "config.json").write_text(json.dumps(there))
    config = recipes.recover(tmp_path, teacher="runs/x", data=dict(source="a.txt"))
    assert config.name == f"{tmp_path.name}_tuned" and config.is_locked
    assert (config.model.to_dict(), config.attention.to_dict()) == (dict(a=1), dict(b=2))
    assert _changed(config.optimizer, recipes.tuning()) == dict(tuned=recipes.TUNED["qk"])
    assert _changed(config.data, DataConfig()) == dict(
        source="a.txt",
        tokenizer=f"{tmp_path}/tokenizer.json",
        vocab_size=7,
        sequence_length=2048,
    )
    assert _changed(config.train, TrainConfig(num_steps=3_662, batch_size=8)) == dict(
        grad_accumulation=8, parent=str(tmp_path), teacher="runs/x"
    )
    assert _changed(config.compute, ComputeConfig()) == dict(remat="attention")
    config = recipes.recover(tmp_path, tune="qkv")
    assert config.optimizer.tuned == recipes.TUNED["qkv"] and config.train.teacher == ""
    for keys, said in (
        (dict(trian={}), "section = 'trian': must be one of 'model', 'attention', 'optimizer'"),
        (dict(name={}), "section = 'name': must be one of"),
        (dict(tune="k"), "tune = 'k': must be one of 'qk', 'qkv', 'attention'"),
    ):
        with pytest.raises(UserError, match=said):
            recipes.recover(tmp_path, **keys)
    (tmp_path / "config.json").write_text(json.dumps(dict(model={}, attention={})))
    with pytest.raises(UserError, match=r"no workdir of a model \(config.json has no 'data'\)"):
        recipes.recover(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"no workdir of a model \(.*No such file.*: `python -m"):
        recipes.recover(tmp_path)
