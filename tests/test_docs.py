"""The documentation's pages: their code, commands, links and tables."""

import inspect
import os
import posixpath
import re
import subprocess
import sys

import pytest

from docs.hooks import families, layouts, pages, support
import kvjax
from kvjax.__main__ import COMMANDS
from kvjax.attention import MECHANISMS, named
from kvjax.convert.architectures import FAMILIES
from kvjax.foundation.checkout import ROOT
from tests import docs_pages, quick
from tests.convert.comparison import PUBLISHED

TEXTS = {name: path.read_text() for name, path in docs_pages.PAGES.items()}
BLOCKS = {name: docs_pages.blocks(text) for name, text in TEXTS.items()}
RUN = [name for name, found in BLOCKS.items() if found and name != "index"]


def test_blocks_of_code_are_found():
    text = "a\n<!-- test: skip: no -->\n```bash\nkvjax \\\n  costs\n```\n\n```python\nx = 1\n```\n"
    shell, python = docs_pages.blocks(text)
    assert (shell.rule, shell.text, shell.commands) == ("skip", "no", ["kvjax    costs"])
    assert (python.language, python.code, python.line) == ("python", "x = 1\n", 9)
    for name, page in TEXTS.items():
        assert len(BLOCKS[name]) == page.count("\n```") / 2, name
        assert page.count("<!-- test:") == sum(block.rule != "" for block in BLOCKS[name]), name


def test_python_compiles_and_commands_are_there():
    """Options of commands: tests/test_readme.py."""
    for name, blocks in BLOCKS.items():
        for block in blocks:
            location = f"{name}.md, line {block.line}"
            assert block.language in ("python", "bash"), location
            assert block.rule in ("", "skip", "add"), location
            if block.language == "python":
                compile(block.code, location, "exec")
        for word in re.findall(r"`kvjax ([a-z_]+)", TEXTS[name]):
            assert word in COMMANDS, (name, word)


def test_links_lead_to_pages_or_to_the_repository():
    """From wherever a page stands, to where its target stands, and never within code."""
    text = (
        "[a](../configs/README.md#data) [`b`](../kvjax/cache) [c](layer.md)\n```\n[d](x.md)\n```\n"
    )
    moved = pages.relinked(text, "docs/decode.md")
    assert moved.startswith("[a](configs/README.md#data) [`b`](https://github.com/")
    assert "/tree/main/kvjax/cache) [c](layer.md)\n```\n[d](x.md)" in moved
    assert "](LOG.md)" in pages.relinked("[x](LOG.md)", "experiments/CLAIMS.md")
    assert "](../../configs/README.md)" in pages.relinked(
        "[x](../../configs/README.md)", "experiments/reports/configs.md"
    )
    sites = {pages.place(f"docs/{name}.md") for name in TEXTS} | set(pages.foreign())
    sites |= {
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs/assets").iterdir()
    }
    for source in [*(f"docs/{name}.md" for name in TEXTS), *pages.foreign()]:
        if not source.endswith(".md"):
            continue
        folder = posixpath.dirname(pages.place(source))
        for link in pages._LINK.findall(pages.relinked((ROOT / source).read_text(), source)):
            target = posixpath.normpath(posixpath.join(folder, link[1]))
            assert target in sites, (source, link)


def test_lists_follow_a_blank_line():
    """GitHub shows a list without it, Python-Markdown a paragraph."""
    begins = re.compile(r"(?m)^(?! *(?:[-*] |\d+\. )|#)\S.*\n(?:- |1\. )")
    assert begins.search("a\n- b") and not begins.search("a\n\n- b\n  c\n- d\n")
    for source in [*(f"docs/{name}.md" for name in TEXTS), *pages.foreign()]:
        if source.endswith(".md"):
            text = re.sub(r"(?ms)^```.*?^```$", "", (ROOT / source).read_text())
            assert not begins.search(text), (source, begins.search(text))


def test_every_public_name_has_an_entry():
    entries = set(re.findall(r"(?m)^::: kvjax\.(\w+)$", TEXTS["api"]))
    assert entries == set(kvjax.__all__)
    html = "".join(f'<h3 id="kvjax.{name}">' for name in kvjax.__all__ if name != "load")
    assert pages.undocumented(html) == ["load"]


def test_the_matrix_has_every_mechanism():
    assert {type(config) for config in support.ROWS.values()} == set(MECHANISMS.values())
    functions = {name for name, _ in inspect.getmembers(named, inspect.isfunction)}
    assert {name.split(",")[0].split()[0] for name in support.ROWS} == functions


@pytest.mark.parametrize(
    ("name", "kernel", "formats", "converted"),
    [
        ("lrkv", "yes", "NanoChat, Llama", "`lrkv`"),
        (
            "tpa",
            "no: the TPU kernels take grouped, residual, factored and latent caches",
            "no: ",
            "",
        ),
    ],
)
def test_the_matrix_asks_the_code(name, kernel, formats, converted):
    config = support.ROWS[name]
    assert support.kernel(support.CHECKS["TPU"], config) == kernel
    assert support.exported(config).startswith(formats)
    assert support.factors(config).startswith("yes" if formats == "NanoChat, Llama" else "no: ")
    assert support.converted_by(config) == converted


@pytest.mark.parametrize(
    ("name", "by_mla", "served"),
    [
        ("Llama 2, SmolLM2", "yes", ("yes", "yes")),
        ("Qwen 2", "yes", ("no: config.attention.bias", "yes")),
        ("Gemma 2", "yes", ("no: config.model.norm_both", "no: config.model.norm_both")),
        ("SmolLM3", "no: needs a model with RoPE in every layer", ("no: `--method=mla`",) * 2),
        ("DeepSeek-V3, dense", "no: ", ("yes", "yes")),
    ],
)
def test_the_matrix_of_families_asks_the_code(name, by_mla, served):
    model = families.transformer(families.ROWS[name])
    assert families.method_cell(model, families.METHODS["mla"]).startswith(by_mla)
    for engine, expected in zip(("vllm", "transformers"), served, strict=True):
        assert families.served_cell(model, engine).startswith(expected)


def test_the_matrix_has_every_family():
    assert {keys["model_type"] for keys in families.ROWS.values()} == set(FAMILIES)
    assert families.matrix().count("\n|") == 1 + len(families.ROWS)


def test_layouts_are_described_as_the_cache_is():
    markdown = pages.made("<!-- made: layouts.arrays -->")
    for name, spec in kvjax.LAYOUTS.items():
        _, cache, _ = layouts.example(name)
        section = markdown.split(f"### {name}\n")[1].split("\n### ")[0]
        for array, values in cache.arrays.items():
            assert f'`cache["{array}"]`' in section and str(list(values.shape)) in section
        for array in spec.arrays:
            assert f"| `{array}`" in section


# -- blocks that run -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A reader's folder, after index.md: it has runs/lrkv_tiny, and a published model."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "models").mkdir()
    (folder / "models" / "SmolLM2-135M-Instruct").symlink_to(PUBLISHED / "llama")
    hub = folder / ".cache/huggingface/hub/models--HuggingFaceTB--SmolLM2-135M-Instruct"
    (hub / "snapshots").mkdir(parents=True)
    (hub / "snapshots" / "1").symlink_to(PUBLISHED / "llama")
    return _read("index", folder)


def _read(name, folder):
    """Runs a page's blocks in a process of its own."""
    cache = {key.upper(): str(value) for key, value in quick.compilation_cache().items()}
    env = {name: value for name, value in os.environ.items() if name[:3] != "HF_"}
    env |= quick.cpu_devices(1) | cache
    env |= dict(HOME=str(folder), PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1")
    env["PATH"] = f"{os.path.dirname(sys.executable)}:{env['PATH']}"
    command = [sys.executable, "-m", "tests.docs_pages", name]
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_blocks_run(name, home):
    _read(name, home)
