"""Other authors' modules: loaded with stand-ins for imports, compared, at pinned commits."""

import dataclasses
import json
import subprocess
import sys
import types

import numpy as np
import pytest

from experiments.benchmarks import authors_code
from experiments.benchmarks.authors import clones, copying, loading
from experiments.benchmarks.authors.comparisons import ALL
from experiments.record import EXPERIMENTS, RESULTS
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output

# A peer in NumPy: GQA with RoPE that rotates by -t. It imports missing modules in all the ways
# that occur in the authors' code.
PEER = """
from dataclasses import dataclass

import absent.deeply.hidden
from absent.activations import TABLE, logging
from absent.kernels import attend
from absent.models import Base, documented
import numpy as np

logger = logging.get_logger(__name__)
TABLE.append(logger)


@dataclass
class Config(Base):
    heads: int = 4
    groups: int = 2


@documented("the module", replace=True)
class Attention(Base):
    def __init__(self, config, weights):
        super().__init__(config)
        self.config, self.weights = config, weights
        logger.warning_once("a module")

    def forward(self, x):
        B, T, _ = x.shape
        of = lambda name, n: (x @ self.weights[f"{name}.weight"].T).reshape(B, T, n, -1)
        q, k, v = of("c_q", self.config.heads), *(of(n, self.config.groups) for n in ("c_k", "c_v"))
        o = attend(turn(q), turn(k), v)
        return o.reshape(B, T, -1) @ self.weights["c_proj.weight"].T


def turn(x):
    half = x.shape[-1] // 2
    theta = 10_000.0 ** (-np.arange(half) / half)
    angle = np.arange(x.shape[1])[:, None, None] * theta
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)
"""


def _attend(q, k, v):
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    logits[..., ~np.tri(q.shape[1], dtype=bool)] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v)


def test_a_module_with_missing_imports_is_compared(x64, tmp_path, monkeypatch):
    finder = loading.Replaced(("absent",), {"absent.kernels": {"attend": _attend}})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    (tmp_path / "llama-gqa.py").write_text(PEER)
    peer = loading.load(tmp_path / "llama-gqa.py")
    for name in (*finder.served, peer.__name__):
        monkeypatch.delitem(sys.modules, name)
    assert {"absent.kernels", "absent.deeply.hidden"} <= finder.served
    assert peer.Config().heads == 4 and peer.Config(groups=1).groups == 1

    comparison = next(c for c in ALL if c.file == "model/llama-gqa.py")  # its sizes and mapping
    width, config, rng = comparison.sizes["n_embd"], comparison.config, np.random.default_rng(0)
    heads = dict(c_q=config.num_heads, c_k=config.num_kv_heads, c_v=config.num_kv_heads)
    weights = {
        f"{name}.weight": rng.standard_normal((n * config.key_dim, width)) / np.sqrt(width)
        for name, n in heads.items()
    }
    weights["c_proj.weight"] = rng.standard_normal((width, config.num_heads * config.key_dim))
    theirs = peer.Attention(peer.Config(), weights)
    x = rng.standard_normal((2, 6, width))
    named = {f"weights/{name}": value for name, value in weights.items()}

    def compared(y, **found):
        row = authors_code.compare(comparison, named | dict(x=x, y=y) | found)
        return row, authors_code.outcome(row)

    row, said = compared(theirs.forward(x), cached=theirs.forward(x))
    assert said == "equal" and 0 < max(row.values()) < authors_code.EQUAL
    planted = theirs.forward(x)
    planted[1, 4, 7] *= 1 + 1e-9
    row, said = compared(planted, cached_error=np.array("ValueError: no"))
    assert said == "differs, its cache raises" and row["their_cache"] == "ValueError: no"
    assert row["rows"] > authors_code.EQUAL < row["cache"]
    assert authors_code.outcome(dict(rows="TypeError: it")) == "raises"

    forgotten = dataclasses.replace(
        comparison, copy=lambda w, c: copying.grouped(w, c, names="c_q c_k - c_proj")
    )
    with pytest.raises(ValueError, match="differ in name or shape: base_value$"):
        authors_code.attention(forgotten, weights, width)


def test_a_clone_must_be_unchanged_at_its_commit(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", "-C", tmp_path / "TPA", *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    folder = tmp_path / "TPA"
    peer = clones.Peer("tensorgi", "3d7f51d")
    clone = (
        f"missing, must be a clone at 3d7f51d: git clone https://github.com/tensorgi/TPA {folder}"
    )
    with pytest.raises(UserError, match=clone):
        peer.check(folder)
    folder.mkdir()
    git("init", "-q")
    (folder / "model.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "--short=7", "HEAD").strip()
    with pytest.raises(UserError, match=f"is {head}, must be a clone at 3d7f51d"):
        peer.check(folder)
    here = clones.Peer("tensorgi", head)
    (folder / "new.pyc").touch()  # files that git does not have change nothing
    here.check(folder)
    (folder / "model.py").write_text("a = 2\n")
    with pytest.raises(UserError, match="has changed files: git -C"):
        here.check(folder)


def test_the_page_has_the_table_of_the_result(capsys):
    result = json.loads((RESULTS / "authors_code.json").read_text())
    authors_code.show(result, Output(types.SimpleNamespace(json=False, markdown=True)))
    page = (EXPERIMENTS / "reports/authors_code.md").read_text()
    assert capsys.readouterr().out.strip() in page
    now = [(c.peer, c.title, c.file, c.outcome, c.why) for c in ALL]
    keys = ("peer", "title", "file", "outcome", "why")
    assert [tuple(row[key] for key in keys) for row in result["results"]] == now
    assert all(authors_code.outcome(row) == row["outcome"] for row in result["results"])
