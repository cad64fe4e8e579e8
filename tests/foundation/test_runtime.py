"""Where things lie, and what is said of a path or a cache that cannot be used."""

import pytest

from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError


@pytest.mark.parametrize(
    "given, message",
    [
        ("gs://bucket/x", r"gs:// needs the package gcsfs: pip install -e '\.\[gcs\]'"),
        ("s3://bucket/x", "s3:// needs the package s3fs: pip install"),
        ("hdfs://host/x", "nothing here opens hdfs://; give a local path, gs://BUCKET"),
        ("://x", "nothing here opens ://"),
        ("~nobody-at-all/x", "there is no user ~nobody-at-all"),
        ("a\0b", "NUL"),
        ("\udcff", "is not UTF-8 text"),
    ],
)
def test_a_path_that_nothing_opens(monkeypatch, given, message):
    monkeypatch.setitem(runtime.BUCKETS, "gs", ("gcsfs_", runtime.BUCKETS["gs"][1]))
    if "gcsfs" in message:
        message = message.replace("gcsfs", "gcsfs_")
    with pytest.raises(UserError, match=f"^--workdir = .*{message}"):
        runtime.path("--workdir", given)


def test_a_path_is_absolute_and_a_bucket_as_it_is(bucket, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert str(runtime.path("--workdir", "a/../b")) == f"{tmp_path}/b"
    assert str(runtime.path("--workdir", "~/b")) == f"{tmp_path}/home/b"
    assert str(runtime.path("--workdir", "gs://bucket/b")) == "gs://bucket/b"
    with pytest.raises(UserError, match="names no bucket"):
        runtime.path("--workdir", "gs://")


def test_a_cache_that_is_a_file_is_told_and_a_relative_one_stays(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for cache in ("file", "file/below", str(tmp_path / "file")):
        monkeypatch.setenv("KVJAX_CACHE", cache)
        with pytest.raises(UserError, match=f"^KVJAX_CACHE = '{cache}': must be a folder"):
            runtime.cache_directory()
    monkeypatch.setenv("KVJAX_CACHE", "new/cache")
    found = runtime.cache_directory()
    monkeypatch.chdir("/")
    assert str(found) == f"{tmp_path}/new/cache"
