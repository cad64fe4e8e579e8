"""Every config resolves to the values of its golden, and to the figures of its note.

The note of a file with one config is its docstring, of a variant its row in
experiments/reports/configs.md, which `experiments.tables.scaling_table` writes.

    python tests/test_configs.py --write

writes the goldens (tests/config_goldens.py) when a config or a default was changed on purpose: read
the diff before committing it.
"""

import ast
import dataclasses
import functools
import math
import re
import runpy
import sys

import jax.numpy as jnp
import ml_collections
import pytest

from experiments.tables import variants
from kvjax import config as config_lib
from kvjax.costs import formulas
from kvjax.foundation import configuration
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.command_line import config_files, config_label, configs_of, load_config
from tests import config_goldens, quick

MID = "mid/"  # of the same names as the configs whose runs these go on from
PAGE = ROOT / "experiments" / "reports" / "configs.md"


def _name(path):
    return f"{MID if path.stem == 'mid' else ''}{config_label(path)}"


FILES = {_name(path): path for path in config_files()}
NAMES = sorted(FILES)
VARIANTS = [name for name in NAMES if not FILES[name].is_file()]
PLAIN = [name for name in NAMES if FILES[name].is_file()]
MECHANISMS = ("mha", "gqa", "mqa", "lrkv", "mla", "mla_paper")
SCALES = ("tiny", "128m", "2p5b", "6p3b")
TOKENS_PER_STEP = {"128m": 524_288, "2p5b": 262_144, "6p3b": 524_288}
TOKENS_PER_STEP |= {"300m": 2_359_296, "1p2b": 1_179_648, "125m": 32_768}
# Variants of each file, and the plain config that each is one change away from.
RANKS = {
    f"lrkv_r{rank}_{scale}": f"lrkv_{scale}"
    for scale, ranks in {
        "128m": (0, 8, 16, 32, 46, 55, 96, 128),
        "2p5b": (16, 46, 55),
        "6p3b": (16, 46, 55),
    }.items()
    for rank in ranks
}
MATCHED = {
    f"{m}_matched_{s}": f"{m}_{s}" for m in ("lrkv", "gqa", "mqa", "mla") for s in SCALES[1:]
}
EQUAL_CACHE = {"gqa9_2p5b": "gqa_2p5b", "lrkv_r56_2p5b": "lrkv_2p5b", "lrkv_r42_128m": "lrkv_128m"}
LONG = {
    f"{name}_2p5b": f"{name.partition('_')[0]}_2p5b"
    for name in ("mha_8k", "gqa_8k", "mqa_8k", "mla_8k", "lrkv_8k")
}
LONG |= {
    f"{m}_{length}_2p5b": f"{m}_2p5b"
    for m in ("lrkv", "mha", "gqa", "mla")
    for length in ("32k", "128k")
}
MID_TRAINING = [f"{MID}{m}_{s}" for s in SCALES[1:] for m in MECHANISMS]
MID_TRAINING += [f"{MID}mla_l384_2p5b", f"{MID}lrkv_tiny"]
# Cached elements per token and layer of LRKV of rank 64 ("wide") and of MLA ("narrow").
CACHED = dict(
    wide={"tiny": 192, "128m": 1024, "2p5b": 2560},
    narrow={"tiny": 64, "128m": 320, "2p5b": 832},
)
RIVALS = [config_label(path) for path in configs_of(ROOT / "configs" / "rivals.py")]
# Models of other papers, with parameters in millions, in total and in attention (projection
# sharing's Tables 5 and 10, thin keys' section 4).
PUBLISHED = {
    "qkv_300m": (305.53, 83.97),
    "kv_tied_300m": (284.54, 62.98),
    "qk_tied_300m": (284.54, 62.98),
    "qkv_tied_300m": (263.55, 41.98),
    "llama_d768_125m": (101.7, None),
    "llama_d192_125m": (91.1, None),
    "llama_d96_125m": (89.3, None),
    "llama_d48_125m": (88.4, None),
}
_GROUPED = ("gqa", "mqa", "kv_tied_gqa", "kv_tied_mqa")
OTHERS = [f"{m}_{s}" for s in ("300m", "1p2b") for m in (*_GROUPED, "qkv", "kv_tied")]
OTHERS += [*PUBLISHED, "kv_tied_gqa8_300m"]
CHANGED = {f"mla_l{latent}_2p5b": "mla_2p5b" for latent in (384, 128)}
CHANGED |= {f"{m}_text_{s}": f"{m}_{s}" for m in ("lrkv", "mha") for s in ("128m", "2p5b")}
TABLES = dict(
    ranks=RANKS,
    matched=MATCHED | EQUAL_CACHE,
    long_context=LONG,
    papers=CHANGED | dict.fromkeys(OTHERS),
)


def _load(name):
    return load_config(FILES[name])


@functools.cache
def _resolve(name):
    return config_lib.resolve(_load(name))


def _changes(name, other):
    """Keys in which two configs differ, and their values in the first."""
    texts = [configuration.to_text(_load(n)).splitlines() for n in (name, other)]
    first, second = (dict(line.split(" = ", 1) for line in text) for text in texts)
    assert first.keys() == second.keys()
    return {k: v for k, v in first.items() if v != second[k] and k != "name"}


def _cache_bytes(name):
    return formulas.cache_bytes_per_token(_resolve(name).model, jnp.dtype(jnp.bfloat16))


def test_every_mechanism_at_every_scale():
    assert {f"{m}_{s}" for m in MECHANISMS for s in SCALES} <= set(NAMES)


def test_mid_training_has_the_mechanisms_of_table_3():
    assert {name for name in NAMES if name.startswith(MID)} == set(MID_TRAINING)


@pytest.mark.parametrize("name", MID_TRAINING)
def test_mid_training_has_the_model_of_its_parent(name):
    """At the parent's rates and without clipping; only a tiny vocabulary has to grow."""
    run, parent = _resolve(name), _resolve(name.removeprefix(MID))
    assert run.train.parent == f"runs/{parent.name}" != f"runs/{run.name}"
    grown = 8 if name.endswith("_tiny") else 0
    vocab_size = parent.model.vocab_size + grown
    assert run.model == dataclasses.replace(parent.model, vocab_size=vocab_size)
    assert run.optimizer == dataclasses.replace(parent.optimizer, clip_norm=0.0)
    parts = [r.train.batch_size // r.train.grad_accumulation for r in (run, parent)]
    assert parts[0] == parts[1] or name.endswith("_tiny")
    if not name.endswith("_tiny"):
        assert (run.train.num_steps, run.train.eval_every, run.tokens_per_step) == (0, 150, 524_288)
        assert run.train.eval_rows * run.data.sequence_length == 10_485_760
        assert not run.is_masked and run.mixture.order[:3] == ("smoltalk", "mmlu", "gsm8k")


def test_names_are_unique_over_files():
    assert len(config_files()) == len(NAMES)


@pytest.mark.parametrize("file", TABLES)
def test_variants_of_a_file(file):
    names = {config_label(path) for path in configs_of(ROOT / "configs" / f"{file}.py")}
    assert names == set(TABLES[file])


@pytest.mark.parametrize("name", RANKS)
def test_rank_is_all_that_differs(name):
    assert _changes(name, RANKS[name]) == {"attention.rank": name.split("_")[1][1:]}


@pytest.mark.parametrize("name", MATCHED)
def test_matched_has_mhas_parameters(name):
    scale = name.rpartition("_")[2]
    count, mha_count = (
        formulas.parameters(_resolve(n).model)["total"] for n in (name, f"mha_{scale}")
    )
    assert count == mha_count  # to the last one, by multiples of 32 channels
    changes = _changes(name, MATCHED[name])
    assert changes.keys() == {"model.mlp_dim"}
    assert int(changes["model.mlp_dim"]) % 32 == 0


@pytest.mark.parametrize("name", quick.every(4, RIVALS))
def test_rivals_have_mhas_parameters_and_a_cache_of_their_class(name):
    """TPA of ranks 1 and 1 comes no nearer than 16 % to the narrow class at d12."""
    _, size, scale = name.rsplit("_", 2)
    count, mha_count = (
        formulas.parameters(_resolve(n).model)["total"] for n in (name, f"mha_{scale}")
    )
    assert abs(count / mha_count - 1) < 0.001
    entry = _resolve(name).model.mechanisms[0].entry()
    elements = sum(math.prod(field.shape) for field in entry.values() if not field.wide)
    tolerance = 0.17 if re.match("tpa.*narrow", name) else 0.07
    assert abs(elements / CACHED[size][scale] - 1) < tolerance


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    total, attention = PUBLISHED[name]
    counts = formulas.parameters(_resolve(name).model)
    assert abs(counts["total"] / 1e6 - total) <= (0.05 if total < 200 else 0.005)
    assert attention is None or abs(counts["attention"] / 1e6 - attention) <= 0.005


@pytest.mark.parametrize("name", OTHERS)
def test_other_authors_models_learn_by_their_own_recipe(name):
    """One rate and one weight decay for all weights of any width; no QK-norm."""
    run = _resolve(name)
    rates = {"300m": 2e-4, "1p2b": 6e-5, "125m": 3e-4}
    rate, c = rates[name.rpartition("_")[2]], run.optimizer
    width = (run.model.block.d_model / 768) ** -0.5
    assert c.matrix_learning_rate == c.vector_learning_rate == rate
    assert width * c.embedding_learning_rate == pytest.approx(rate)
    assert (c.matrices, c.matrix_weight_decay, c.adam_weight_decay) == ("adamw", 0.1, 0.1)
    assert (c.schedule, c.final_fraction, c.adam_b1, c.adam_b2) == ("cosine", 0.1, 0.9, 0.95)
    assert run.model.mechanisms[0].qk_norm == "none" and run.model.block.tied_head
    assert run.model.mechanisms[0].bias == run.model.block.bias == (not name.startswith("llama"))
    assert run.model.block.dropout == (0.0 if name.startswith("llama") else 0.1)


@pytest.mark.parametrize("name", CHANGED)
def test_one_change_away(name):
    changes = _changes(name, CHANGED[name]).keys()
    if name.startswith("mla"):
        assert changes == {"attention.latent_dim"}
    else:
        assert changes == {
            *(f"optimizer.{key}" for key in ("adam_b1", "matrix_weight_decay", "schedule")),
            *(f"optimizer.{key}" for key in ("adam_weight_decay", "warmup_steps")),
        }


@pytest.mark.parametrize("name", EQUAL_CACHE)
def test_equal_cache(name):
    notes = runpy.run_path(str(ROOT / "configs" / "matched.py"))["NOTES"]
    (rival,) = re.findall(r"The cache of (\w+)\.", notes[name])
    sizes = _cache_bytes(name), _cache_bytes(rival)
    assert abs(sizes[0] / sizes[1] - 1) < 0.0053  # 6 heads' 1/rms: no rank is nearer
    key = "attention.rank" if "lrkv" in name else "attention.num_kv_heads"
    assert _changes(name, EQUAL_CACHE[name]).keys() <= {key, "attention.num_bases"}


@pytest.mark.parametrize("name", LONG)
def test_long_context(name):
    length = 1024 * int(re.search(r"_(\d+)k_", name)[1])
    run = _resolve(name)
    assert run.data.sequence_length == length
    changes = _changes(name, LONG[name])
    expected = {"data.sequence_length", "train.batch_size", "train.eval_rows"}
    expected |= {"mesh.sequence"} if length > 8192 else set()
    expected |= {"model.rope_base"} if length == 131_072 else set()
    expected |= {"compute.remat"} if name == "mla_128k_2p5b" else set()  # else it does not fit
    assert changes.keys() == expected
    assert run.train.eval_rows * length == 5120 * 2048
    assert (run.mesh.sequence > 1) == (length > 8192)
    assert length % (2 * run.mesh.sequence) == 0


AGAIN = (
    "If the change is meant (it changes what a config trains, and every figure measured with it), "
    "run `python tests/test_configs.py --write` and commit the difference; if not, undo it."
)


@pytest.mark.parametrize("name", NAMES)
def test_file(name):
    """Compares a config with its golden; it is locked, and flags can set every key of it."""
    config = _load(name)
    assert name in config_goldens.read(), f"{name}: no golden. {AGAIN}"
    values = config_goldens.values(config)
    assert values == config_goldens.expected(name), f"{name} differs from its golden. {AGAIN}"
    run = _resolve(name)
    assert config.name == run.name == name
    sections = [s for s in config.values() if isinstance(s, ml_collections.ConfigDict)]
    assert config.is_locked and all(section.is_locked for section in sections)
    parts = dict(model=run.model.block, optimizer=run.optimizer, data=run.data, train=run.train)
    parts |= dict(compute=run.compute, mesh=run.mesh)
    parts |= {} if run.mixture is None else dict(mixture=run.mixture)
    for section, resolved in parts.items():
        assert set(config[section]) == set(vars(resolved)), section
    assert set(config.attention) - {"kind", "layer_ranks"} == set(vars(run.model.mechanisms[0]))
    if not name.endswith("_tiny"):
        scale = name.rpartition("_")[2]
        tokens = 524_288 if name.startswith(MID) else TOKENS_PER_STEP[scale]
        assert run.tokens_per_step == tokens


def test_golden_defaults():
    _, pinned = config_goldens.read()[config_goldens.DEFAULTS]
    assert config_goldens.defaults() == pinned, f"Defaults differ from their golden. {AGAIN}"


def test_no_golden_without_a_config():
    assert config_goldens.read().keys() == {config_goldens.DEFAULTS, *NAMES}


def test_the_page_lists_each_variant():
    assert variants.markdown() in PAGE.read_text()


@pytest.mark.parametrize("name", quick.every(3, PLAIN))
def test_docstring(name):
    doc = ast.get_docstring(ast.parse(FILES[name].read_text()), clean=False)
    run = _resolve(name)
    assert f"    python -m kvjax.main --config={FILES[name].relative_to(ROOT)}\n" in doc
    counts = formulas.parameters(run.model)
    pattern = r"([\d,]+) parameters, ([\d,]+) without the input embedding; ([\d,]+) cache\s+bytes"
    total, without, cache = (int(n.replace(",", "")) for n in re.search(pattern, doc).groups())
    assert total == counts["total"]
    assert without == counts["total"] - counts["embedding"]
    assert cache == formulas.cache_bytes_per_token(run.model, jnp.dtype(jnp.bfloat16))
    flops = formulas.training_flops_per_token(run.model, run.data.sequence_length)
    assert float(re.search(r"([\d.]+) GFLOP\s+per\s+trained", doc).group(1)) == round(
        flops / 1e9, 3
    )
    block = run.model.block
    shape = r"(\d+) layers,\s+width (\d+),\s+(\d+) heads of (\d+)"
    first = run.model.mechanisms[0]
    assert tuple(map(int, re.search(shape, doc).groups())) == (
        block.num_layers,
        block.d_model,
        first.num_heads,
        first.value_dim,
    )
    tokens = run.train.num_steps * run.tokens_per_step
    if budget := re.search(
        r"Budget: ([\d.]+)B tokens in steps of ([\d,]+): ([\d,]+) exaFLOPs", doc
    ):
        assert f"{tokens / 1e9:.3g}" == budget[1]
        step, exaflops = (int(n.replace(",", "")) for n in budget.groups()[1:])
        assert run.tokens_per_step == step
        assert round(tokens * flops / 1e18) == exaflops
    elif budget := re.search(r"Budget: ([\d.]+)M tokens in .* ([\d,]+): ([\d,]+) petaFLOPs", doc):
        assert budget[1] == f"{tokens / 1e6:.1f}" and budget[2] == f"{run.tokens_per_step:,}"
        assert budget[3] == f"{round(tokens * flops / 1e15):,}"
    else:
        assert f"{tokens / 1e6:.1f}M tokens" in doc


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/test_configs.py --write")
    order = PLAIN + sorted(VARIANTS, key=FILES.get)
    config_goldens.write({name: config_goldens.values(_load(name)) for name in order})
