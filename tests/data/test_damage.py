"""Damaged prepared data: prepared again in the cache, refused elsewhere."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest

from kvjax.data import loader, manifest, prepare
from kvjax.data.manifest import MANIFEST, TOKENIZER
from kvjax.foundation.errors import DataError, UserError
from tests import quick
from tests.data.corpora import damage
from tests.data.test_prepare import rows

HOW = ("half", "empty", "missing", "flipped", "longer")
FILES = (
    MANIFEST,
    TOKENIZER,
    "packed_rows/1.0.0/features.json",
    "packed_rows/1.0.0/dataset_info.json",
    "packed_rows/1.0.0/packed_rows-train.array_record-00000-of-00001",
)


@pytest.mark.parametrize("how", quick.every(5, HOW))
@pytest.mark.parametrize("file", quick.every(2, FILES))
def test_damage_to_the_cache_is_set_aside_and_made_again(
    small_dataset, small_config, capsys, tmp_path, file, how
):
    root = pathlib.Path(tmp_path / "prepared")
    shutil.copytree(small_config.root, root)
    config = dataclasses.replace(small_config, directory=str(root))
    path = pathlib.Path(prepare.prepare(config))
    damage(path / file, how)
    if "array_record" in file and how == "flipped":  # rows are checked only when they are read
        with pytest.raises(DataError, match=f"{path} is damaged: .*Move that folder away"):
            rows(loader.open_dataset(prepare.prepare(config)), "train")
        return
    prepared_again = loader.open_dataset(prepare.prepare(config))
    assert prepared_again.info["splits"] == small_dataset.info["splits"]
    for name in manifest.SPLITS:
        np.testing.assert_array_equal(rows(prepared_again, name), rows(small_dataset, name))
    aside = path.with_name(f"{path.name}.damaged")
    assert aside.exists() and (how == "missing") != (aside / file).exists()
    assert f"WARNING: {path} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("file", FILES)
def test_damage_to_data_prepared_elsewhere_is_told(small_dataset, tmp_path, file, how):
    path = tmp_path / "elsewhere"
    shutil.copytree(small_dataset.path, path)
    damage(path / file, how)
    missing = file == MANIFEST and how == "missing"
    message = "holds no prepared data" if missing else "is damaged: .*`python -m kvjax.data.prepare"
    if file == MANIFEST:
        message = message.split(":")[0]
    elif how == "missing":
        message = f"is damaged: {file} is missing"
    with pytest.raises(UserError, match=f"(?s){path} {message}"):
        dataset = loader.open_dataset(path)
        rows(dataset, "train")


COUNTS = """{
    "format_version": 1, "config": {"sequence_length": 16}, "xz_bits_per_byte": 2.5,
    "splits": {"train": {"rows": 1}, "validation": {"rows": 1}}, "tokenizer": {"sha256": ""}
}"""


@pytest.mark.parametrize(
    "manifest",
    [
        "[" * 100_000,
        "[]",
        "{}",
        '"text"',
        '{"format_version": 1}',
        '{"format_version": 1, "config": [], "splits": {}}',
        COUNTS.replace('"rows": 1', '"rows": -1'),
        COUNTS.replace("2.5", '"many"'),
        b"\xff\xfe{\x00",
    ],
)
def test_a_manifest_that_says_nothing_is_told(small_dataset, tmp_path, manifest):
    path = tmp_path / "odd"
    shutil.copytree(small_dataset.path, path)
    (path / MANIFEST).write_bytes(manifest if isinstance(manifest, bytes) else manifest.encode())
    with pytest.raises(
        DataError, match=f"{path} is damaged: dataset.json is not as it was written"
    ):
        loader.open_dataset(path)


def test_data_prepared_before_there_were_digests_are_read(small_dataset, tmp_path):
    path = tmp_path / "old"
    shutil.copytree(small_dataset.path, path)
    info = {k: v for k, v in small_dataset.info.items() if k not in ("files", "blake2b")}
    (path / MANIFEST).write_text(json.dumps(info))
    old = loader.open_dataset(path)
    np.testing.assert_array_equal(rows(old, "train"), rows(small_dataset, "train"))


@pytest.mark.parametrize("how", quick.every(3, HOW))
def test_a_damaged_tokenizer_of_the_cache_is_trained_again(
    small_dataset, small_config, capsys, tmp_path, how
):
    root = pathlib.Path(tmp_path / "prepared")
    shutil.copytree(small_config.root, root)
    (folder,) = (root / "tokenizers").iterdir()
    damage(folder / TOKENIZER, how)
    config = dataclasses.replace(small_config, directory=str(root), sequence_length=9)
    other = loader.open_dataset(prepare.prepare(config))
    assert other.tokenizer.to_json() == small_dataset.tokenizer.to_json()
    assert folder.with_name(f"{folder.name}.damaged").exists()
    assert f"WARNING: {folder} is damaged" in capsys.readouterr().err
