"""kvjax as pip installs it: outside its checkout, and without the packages of its extras."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import jax
import pytest

from kvjax.foundation.checkout import CONFIGS, PACKAGE, ROOT
from kvjax.foundation.extras import EXTRAS

PUBLISHED = ROOT / "tests" / "convert" / "published" / "llama"
# Command lines, their exit status, and what they say.
LINES = [
    ("kvjax", 0, "configs/rivals.py:VARIANT"),
    ("kvjax.costs --config=configs/lrkv_tiny.py", 0, "lrkv_tiny"),
    ("kvjax.costs --config=configs/lrkv_tny.py", 2, "mean --config=configs/lrkv_tiny.py?"),
    ("kvjax.main --config=configs/mid.py:lrkv_tiny --config.train.seed=x", 2, "a whole number"),
    ("kvjax.convert --source=published --out=x", 2, "kvjax[convert]"),
    ("kvjax.convert --source=model.gguf --out=x", 2, "kvjax[convert]"),
    ("kvjax.analysis --model=published", 2, "kvjax[convert]"),
    ("kvjax.convert.export --workdir=nowhere --out=x", 2, "nowhere is no workdir"),
    ("kvjax.aot --config=configs/lrkv_tiny.py --topology=v5e:2x2", 2, "kvjax[aot]"),
    ("kvjax.aot --config=configs/lrkv_tiny.py --topology=h200:8", 2, "kvjax[aot]"),
    ("kvjax.kernels.profile --device=v5e", 2, "kvjax[aot]"),
    ("kvjax.data.prepare --beam_pipeline_options=runner=DirectRunner", 2, "kvjax[beam]"),
    ("kvjax.data.prepare --source=gs://bucket/x", 2, "kvjax[gcs]"),
    ("kvjax.evaluate --help", 0, "--humaneval"),
    ("kvjax.main --trackers=wandb", 2, "kvjax[wandb]"),
    ("kvjax.chat --help", 0, "--temperature"),
    ("kvjax.generate --help", 0, "--prompt_file"),
    ("kvjax.compare --help", 0, "--json"),
    ("kvjax.sweep configs/lrkv_tiny.py --set=attention.rnk=4", 2, "mean 'rank'?"),
    ("kvjax.lm_eval --help", 0, "kvjax[lm-eval]"),
]
# What is in one of these without any extra, and what each command says.
BARE = [
    ("kvjax", 0, "kvjax costs"),
    ("kvjax.costs --config=lrkv_tiny", 0, "lrkv_tiny"),
    ("kvjax.main --help", 0, "--workdir"),
    ("kvjax.kernels.profile --help", 0, "--device"),
    ("kvjax.generate --help", 2, "kvjax[train]"),
    ("kvjax.chat --help", 2, "kvjax[train]"),
    ("kvjax.evaluate --help", 2, "kvjax[train]"),
    ("kvjax.compare --help", 2, "kvjax[train]"),
    ("kvjax.sweep --help", 2, "kvjax[train]"),
    ("kvjax.convert --help", 2, "kvjax[convert]"),
    ("kvjax.convert.export --help", 2, "kvjax[convert]"),
    ("kvjax.analysis --help", 2, "kvjax[analysis]"),
    ("kvjax.aot --help", 2, "kvjax[aot]"),
    ("kvjax.data.prepare --help", 2, "kvjax[data]"),
]
RUN = """
import contextlib, importlib, importlib.util, io, json, sys, traceback
from kvjax.foundation import command_line, extras
for line in json.loads(sys.argv[1]):
    name, *arguments = line.split()
    name += ".__main__" if importlib.util.find_spec(name).submodule_search_locations else ""
    said = io.StringIO()
    sys.argv[0] = "kvjax " + line.split()[0].rpartition(".")[2]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = command_line.status(importlib.import_module(name).main, arguments)
        except ModuleNotFoundError as error:  # as environment.watch_imports' hook
            print("kvjax:", extras.missing(error))
            status = 2
        except BaseException:
            traceback.print_exc()
            status = 1
    print(json.dumps([status, said.getvalue()]))
"""


@pytest.mark.parametrize("lines", [LINES, BARE], ids=["train", "core"])
def test_commands_find_configs_and_name_the_extra_that_they_lack(tmp_path, lines):
    site, missing = tmp_path / "site", {"kvjax"}
    missing |= {module for module, extra in EXTRAS.items() if lines is BARE or extra != "train"}
    site.mkdir()
    for path in pathlib.Path(jax.__file__).parents[1].iterdir():
        if path.name not in missing:
            (site / path.name).symlink_to(path)
    shutil.copytree(PACKAGE, site / "kvjax", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(CONFIGS, site / "kvjax" / "configs")
    (site / "experiments").mkdir()  # another package's
    (site / "experiments" / "foreign.py").write_text('if __name__ == "__main__": pass')
    (tmp_path / "published").symlink_to(PUBLISHED)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    python = [sys.executable, "-S", "-P"]
    options = dict(cwd=tmp_path, env=os.environ | dict(PYTHONPATH=str(site), JAX_PLATFORMS="cpu"))
    arguments = [*python, "-c", RUN, json.dumps([line for line, *_ in lines])]
    run = subprocess.run(arguments, **options, capture_output=True, text=True, check=True)
    assert "foreign" not in run.stdout
    for (line, status, message), outcome in zip(lines, run.stdout.splitlines(), strict=True):
        code, text = json.loads(outcome)
        assert (code, message in text, "Traceback" in text) == (status, True, False), (line, text)
        *_, last = text.strip().splitlines()
        assert status == 0 or (last.startswith("kvjax: ") and message in last), (line, text)
    if lines is BARE:
        for command in ("kvjax.convert", "kvjax convert"):
            result = subprocess.run(
                [*python, "-m", *command.split(), "--source=published"],
                **options,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (result.returncode, result.stdout) == (2, "")
            assert result.stderr == (
                "kvjax: tokenizers is not installed: pip install 'kvjax[convert]'\n"
            )
        code = "import kvjax; kvjax.mha(num_heads=4); kvjax.Model"
        result = subprocess.run(
            [*python, "-c", code], **options, capture_output=True, text=True, check=False
        )
        *_, last = result.stderr.splitlines()
        why = "tokenizers is not installed: pip install 'kvjax[train]'"
        assert (result.returncode, last) == (1, f"ModuleNotFoundError: {why}")


@pytest.mark.slow
def test_the_wheel_has_all_configs_and_extras(tmp_path):
    """Skipped where pip cannot fetch setuptools."""
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source / "kvjax", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(CONFIGS, source / "configs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path)]
    run = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    if run.returncode and "setuptools" in run.stderr:
        pytest.skip(run.stderr.strip().splitlines()[-1])
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        (metadata,) = (name for name in files if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    for folder, target in ((CONFIGS, "kvjax/configs"), (PACKAGE, "kvjax")):
        assert {f"{target}/{path.relative_to(folder)}" for path in folder.rglob("*.py")} <= files
    required = re.findall(r'(?m)^Requires-Dist: ([\w-]+).*extra == "(.+)"', text)
    installs = {(name.replace("_", "-"), extra) for name, extra in required}

    def normal(name):
        return {"PIL": "pillow"}.get(name, name).replace("_", "-")

    assert {(normal(m), extra) for m, extra in EXTRAS.items() if m != "gcsfs"} <= installs
    assert ("etils", "gcs") in installs  # which installs gcsfs
