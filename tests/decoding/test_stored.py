"""Compiled programs on disk give the same tokens untraced; a bad file costs a compilation."""

import os
import threading

import jax
import pytest

from kvjax.decoding import engine, stored
from kvjax.decoding.generator import Generator


@pytest.fixture
def tokens(loaded, tmp_path, monkeypatch):
    """Generates with a new generator; returns the tokens and the number of compilations."""
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(stored, "_loading", {})  # without what commands in this process left
    compiled = []

    def compile_(jitted, arguments, real=stored._compile):
        compiled.append(jitted)
        return real(jitted, arguments)

    monkeypatch.setattr(stored, "_compile", compile_)

    def generate(*, keep=True):
        compiled.clear()
        generator = Generator(loaded.model, loaded.compute, stored=keep)
        generation = generator.start([[256, 5, 9], [256, 7]], num_tokens=4)
        list(generation)
        return generation.tokens, len(compiled)

    return generate


def test_programs_are_loaded_instead_of_traced(tokens, tmp_path, monkeypatch):
    expected, _ = tokens(keep=False)
    assert tokens() == (expected, 2)  # prefill and decode step
    assert tokens() == (expected, 0)
    programs = sorted((tmp_path / "programs").iterdir())
    assert len(programs) == 2 and os.stat(tmp_path / "programs").st_mode & 0o77 == 0
    programs[0].write_bytes(programs[0].read_bytes()[:-100])  # cut off
    programs[1].write_bytes(b"")
    assert tokens() == (expected, 2)
    assert tokens() == (expected, 0)
    os.chmod(tmp_path / "programs", 0o770)
    assert tokens() == (expected, 2), "loading a pickle runs code: others must not have written it"
    os.chmod(tmp_path / "programs", 0o700)
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} ")
    assert tokens() == (expected, 2), "flags are part of the key"
    monkeypatch.setattr(stored, "package_digest", lambda: "other code")
    monkeypatch.setattr(stored, "LIMIT", 3)
    assert tokens() == (expected, 2)
    assert len(list((tmp_path / "programs").iterdir())) == 3
    assert jax.config.jax_enable_compilation_cache


def test_a_thread_loads_the_latest_programs(tokens, loaded, monkeypatch):
    """The generator takes what it loaded, and compiles after a bad file or for other sizes."""
    expected, _ = tokens()
    readers = []

    def read(path, devices, real=stored._read):
        readers.append(threading.current_thread())
        return real(path, devices)

    monkeypatch.setattr(stored, "_read", read)
    monkeypatch.setattr(stored.runtime, "start", lambda: None)  # would set a compilation cache

    def start():
        engine.start_loading(loaded.model.config, loaded.compute)

    for content, start_loading in ((None, start), (None, stored.start_early), (b"cut off", start)):
        for file in stored._folder().iterdir() if content else ():
            file.write_bytes(content)
        readers.clear()
        start_loading()
        start()  # what is being loaded is not loaded again
        assert tokens() == (expected, 2 if content else 0)
        assert len(readers) == 2 and threading.main_thread() not in readers
    with monkeypatch.context() as patch:
        patch.setattr(stored, "package_digest", lambda: "other code")
        stored.start_early()
        assert not stored._loading, "programs of other code may not even load"
    engine.start_loading(loaded.model.config, loaded.compute)
    generator = Generator(loaded.model, loaded.compute, stored=True)
    assert list(generator.start([[256, 5, 9]], num_tokens=4)), "one sequence instead of two"


def test_without_a_folder_programs_are_compiled(tokens, tmp_path):
    (tmp_path / "programs").write_text("a file")
    expected, compilations = tokens()
    assert compilations == 2 and tokens() == (expected, 2)
