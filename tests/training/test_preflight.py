"""Checks before a run begins: memory, mesh, data; for several processes: test_multihost.py."""

import contextlib
import dataclasses
import functools
import pathlib
import types

from etils import epath
import jax
import numpy as np
import pytest

import kvjax
from kvjax import config as config_lib
from kvjax.data import loader, tokenizer
from kvjax.data.config import PREPARE_HOURS, DataConfig
from kvjax.distributed import sharding
from kvjax.foundation import checkout, runtime
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.foundation.errors import UserError
from kvjax.training import loop, memory_estimate, preflight
from tests import runs


def test_memory_is_checked_before_anything_is_allocated(tmp_path):
    with pytest.raises(UserError) as error:
        loop.train(load_config(CONFIGS / "lrkv_2p5b.py"), epath.Path(tmp_path / "run"))
    message = str(error.value)
    for part in ("parameters", "optimizer", "gradients", "activations", "needed", "available"):
        assert part in message
    assert "1.2 GB" in message and "configs/lrkv_tiny.py" in message
    assert not (tmp_path / "run").exists()


def test_accelerators_have_a_margin_of_a_quarter_and_cpus_none(monkeypatch):
    """The estimate may exceed an accelerator's memory by 25 %, since its compiler decides."""
    config = config_lib.resolve(load_config(CONFIGS / "lrkv_128m.py"))
    train = dataclasses.replace(config.train, batch_size=96, grad_accumulation=3)
    run = dataclasses.replace(config, train=train)
    shape = dict(data=2, fsdp=4, sequence=3, tensor=5)
    taught_by = types.SimpleNamespace(experiment=types.SimpleNamespace(model="teacher"))
    bytes_of = dict(parameters=3 * 10**9, optimizer=5 * 10**9, gradients=7 * 10**9)
    need = memory_estimate.TrainingMemory(**bytes_of, weights=11 * 10**9, activations=6 * 10**9)
    calls = []

    def estimate(*args, **options):
        calls.append((args, options))
        return need

    monkeypatch.setattr(memory_estimate, "estimate", estimate)
    for platform, share, lanes in (("cpu", 1.0, 1), ("gpu", 0.8, 1), ("tpu", 0.8, 128)):
        device = types.SimpleNamespace(platform=platform, device_kind="a chip")
        mesh = types.SimpleNamespace(shape=shape, size=120, devices=np.array([device]))
        available = round(share * 32e9)
        monkeypatch.setattr(runtime, "memory_per_device", lambda n=available: n)
        preflight.check_memory(run, "compute", mesh)
        assert calls.pop() == (
            (run.model, "compute"),
            dict(
                **dict(
                    optimizer=run.optimizer, teacher=None, rows_per_device=4, accumulation_steps=3
                ),
                **dict(sequence_length=2048, fsdp=4, tensor=5, sequence=3, lanes=lanes),
                attention_kernel=platform != "cpu",
            ),
        )
        available -= 10**6
        monkeypatch.setattr(runtime, "memory_per_device", lambda n=available: n)
        with pytest.raises(UserError) as error:
            preflight.check_memory(run, "compute", mesh, taught_by)
        assert calls.pop()[1]["teacher"] == "teacher"
        assert str(error.value) == (
            f"{run.name} does not fit on 120 x a chip ({platform}). Bytes per device:\n"
            "  parameters         3.0 GB\n  optimizer          5.0 GB\n"
            "  gradients          7.0 GB\n  weights used      11.0 GB  (estimated)\n"
            "  activations        6.0 GB  (estimated)\n  needed            32.0 GB\n"
            f"  available    {available / 1e9:>9.1f} GB\n"
            # (20 x 15 + 120 x 6) GB over 72 - 11 GB
            "With weights and batch sharded, this run fits on 17 or more devices of 80 GB.\n"
            "A larger config.train.grad_accumulation and config.compute.remat = 'full' reduce the "
            "activations.\nThe configs configs/*_tiny.py run here, such as: python -m kvjax.main "
            "--config=configs/lrkv_tiny.py"
        )
    need = dataclasses.replace(need, weights=72 * 10**9)
    with pytest.raises(UserError, match="this run fits on no number of devices of 80 GB"):
        preflight.check_memory(run, "compute", mesh)


def test_batches_must_divide_over_devices(source):
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, sequence=2), jax.devices()[:8])
    experiment = config_lib.resolve(runs.small_config(*source, batch_size=6))
    with pytest.raises(UserError, match=r"batch_size = 6: .* fsdp = 4; use a .* of 4: 4 or 8"):
        preflight.check_mesh(experiment, mesh)
    two = config_lib.resolve(runs.small_config(*source, batch_size=4, grad_accumulation=2))
    with pytest.raises(UserError, match=r"microbatches of 2 rows .*= 2\) .* multiple of 8: 8$"):
        preflight.check_mesh(two, mesh)
    preflight.check_mesh(config_lib.resolve(runs.small_config(*source, batch_size=4)), mesh)


@pytest.mark.parametrize(
    "name, devices, mesh, better",
    [
        ("mha_tiny", 6, {}, "data=3 --config.mesh.fsdp=2 --config.mesh.tensor=1"),
        ("mha_2p5b", 8, dict(tensor=4), "data=1 --config.mesh.fsdp=4 --config.mesh.tensor=2"),
        ("lrkv_6p3b", 8, dict(tensor=2), "data=1 --config.mesh.fsdp=8 --config.mesh.tensor=1"),
    ],
)
def test_a_mesh_that_does_not_divide_names_one_that_does(name, devices, mesh, better):
    run = config_lib.resolve(load_config(CONFIGS / f"{name}.py"))
    device_mesh = sharding.make_mesh(sharding.MeshConfig(**mesh), jax.devices()[:devices])
    with pytest.raises(
        UserError, match=f"not divide .* {devices} devices this mesh divides: .*{better}$"
    ):
        preflight.check_mesh(run, device_mesh)


@pytest.mark.parametrize(
    "mesh, length, message",
    [
        (dict(tensor=2), 32, r"config.mesh.tensor = 2 does not divide the 257 of head \[32, 257\]"),
        (dict(fsdp=1, sequence=8), 24, "sequence = 8 .* 16 chunks, .* 24 tokens .* is 16 or 32"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model(source, tmp_path, mesh, length, message):
    """Before the data are prepared or a file is written."""
    config = runs.small_config(*source)
    config.mesh.update(mesh)
    config.data.update(sequence_length=length, directory=str(tmp_path / "data"))
    with pytest.raises(UserError, match=message):
        loop.train(config, epath.Path(tmp_path / "run"))
    assert not (tmp_path / "run").exists() and not (tmp_path / "data").exists()


def test_a_tokenizer_json_with_another_vocabulary(source, tmp_path):
    """Before the data are prepared or a file is written."""
    file = tmp_path / "tokenizer.json"
    tokenizer.byte_tokenizer().save(file)
    config = runs.small_config(*source)
    config.data.update(tokenizer=str(file), vocab_size=300, directory=str(tmp_path / "data"))
    with pytest.raises(UserError, match=r"= 300: the tokenizer '.*/tokenizer\.json' has 257; set"):
        loop.train(config, epath.Path(tmp_path / "run"))
    assert not (tmp_path / "run").exists() and not (tmp_path / "data").exists()


def test_prepared_rows_with_another_vocabulary(source, tmp_path, monkeypatch):
    folder = runs.prepare_text(source[0], tmp_path, "xylophone")
    config = runs.small_config(f"prepared:{folder}", "")
    config.data.update(vocab_size=300, tokenizer="bpe")
    data = config_lib.resolve(config).data
    with pytest.raises(UserError, match="^config.data.vocab_size = 300: the tokenizer .* has 272"):
        preflight.prepare_dataset(data)
    config.data.update(vocab_size=320, tokenizer="of/another/host/tokenizer.json")  # 272, rounded
    assert preflight.prepare_dataset(config_lib.resolve(config).data).vocab_size == 272

    def find(*_, **__):
        raise UserError("stopped here")

    monkeypatch.setattr(preflight, "find_parent_and_teacher", find)
    with pytest.raises(UserError, match="stopped here"):
        with preflight.prepare_run(config, tmp_path / "run", 1.0):
            pass
    config = load_config(CONFIGS / "mid.py:lrkv_tiny", [])
    config.train.parent, config.data.tokenizer = "", "byte"
    config.data.vocab_size = 265  # with the special tokens of conversations
    with pytest.raises(UserError, match="stopped here"):
        with preflight.prepare_run(config, tmp_path / "run", 1.0):
            pass


def test_hosts_compare_the_code_of_all_folders(monkeypatch):
    seen, gathered = [], {}
    recording = types.SimpleNamespace(update=seen.append, hexdigest=lambda: "0" * 64)
    monkeypatch.setattr(preflight.distributed, "check_same", gathered.update)
    monkeypatch.setattr(checkout.hashlib, "sha256", lambda: recording)
    monkeypatch.setattr(preflight, "package_digest", checkout.package_digest.__wrapped__)
    preflight.check_processes(load_config(CONFIGS / "lrkv_tiny.py"))
    names = {part.partition(b"\0")[0].decode() for part in seen}
    package = pathlib.Path(kvjax.__file__).parent
    assert names == {str(path.relative_to(package)) for path in package.rglob("*.py")}
    assert gathered["kvjax's code"] == "0" * 12


def test_order_of_checks_and_writes(monkeypatch):
    """Pins the calls for texts and conversations, new or resumed, by process."""
    events = []

    def fake(name, real=lambda *given, **options: None):
        *path, last = name.split(".")
        owner = functools.reduce(getattr, path, preflight)

        def recorded(*given, **options):
            events.append((last, *given, *options.items()))
            return real(*given, **options)

        monkeypatch.setattr(owner, last, recorded)

    @contextlib.contextmanager
    def exclusive(workdir):
        yield
        events.append("let go")

    model = types.SimpleNamespace(block=types.SimpleNamespace(num_layers=3))
    train = types.SimpleNamespace(num_steps=9, parent="name")
    compute = types.SimpleNamespace(dtype="f2")
    compute_config = types.SimpleNamespace(resolve=lambda *given: {("gpu", 3): compute}[given])
    data = types.SimpleNamespace(tokenizer="bpe")
    run = dict(train=train, model=model, compute=compute_config, data=data, mesh="ways")
    texts = types.SimpleNamespace(**run, mixture=None)
    talk = types.SimpleNamespace(**run, mixture="mixture")
    talk.train = types.SimpleNamespace(num_steps=0, parent="")
    planned = types.SimpleNamespace(**run, mixture="mixture")
    device = types.SimpleNamespace(platform="gpu")
    mesh = types.SimpleNamespace(devices=np.array([[device]]))

    def saved_model(model):
        return types.SimpleNamespace(
            **dict(workdir="w", checkpoints="c", step=7, context=64),
            experiment=types.SimpleNamespace(model=model),
        )

    parent, teacher, steps = saved_model("older"), saved_model("other"), []
    monkeypatch.setattr(jax, "devices", lambda: "devices")
    monkeypatch.setattr(preflight.config_lib, "resolve", dict(texts=texts, talk=talk).get)
    monkeypatch.setattr(runtime, "workdir", lambda path: epath.Path(path) / "full")
    monkeypatch.setattr(preflight.storage, "steps", lambda at: at.name == "checkpoints" and steps)
    for name in ("check_processes", "check_mesh", "check_memory"):
        fake(name)
    fake("sharding.make_mesh", lambda *given: mesh)
    fake("find_parent_and_teacher", lambda *given, **options: (parent, teacher))
    fake("check_tokenizer")
    fake("prepare_dataset", lambda *given, **options: "rows")
    fake("identity.exclusive", exclusive)
    for name in ("set_aside_earlier_run", "check_config", "check_data", "write_run_identity"):
        fake(f"identity.{name}")
    fake("distributed.check_shared")
    fake("distributed.index", lambda: index)
    fake("distributed.gather")
    fake("conversations.prepare_dataset", lambda *given: "rows")
    fake("conversations.one_epoch", lambda *given: ("talk of 9", planned))
    fake("origin.inherit")
    fake("lineage.remove")
    fake("lineage.write")
    index, w = 0, epath.Path("run/full")

    def prepared(config):
        events.clear()
        with preflight.prepare_run(config, "run", 2.5) as given:
            events.append("given")
        assert given[1:] == (compute, mesh, w, "rows", parent, teacher)
        e = dict(texts=texts, talk=talk)[config]
        assert given.experiment is (texts if config == "texts" else planned)
        assert events[-3:] == [("gather", "claimed", ""), "given", "let go"]
        start = [
            ("check_processes", config),
            ("find_parent_and_teacher", e, ("begun", bool(steps))),
            *(("make_mesh", "ways", "devices"), ("check_mesh", e, mesh)),
            ("check_memory", e, compute, mesh, teacher),
            *(("exclusive", w), ("check_shared", w), ("index",)),
        ]
        assert events[: len(start)] == start
        return events[len(start) : -3]

    models = ("parent", parent), ("teacher", teacher)
    of_texts = [
        *(("set_aside_earlier_run", w), ("check_config", w, "texts", "f2")),
        *(("prepare_dataset", data, 2.5, ("padded", True)), ("check_data", w, "rows")),
        *(
            ("check_tokenizer", texts, "rows", *models),
            ("write_run_identity", w, "texts", "f2", "rows"),
        ),
    ]
    inherited = ("inherit", w, "w", 64)
    assert prepared("texts") == [*of_texts, inherited, ("write", w, "w", "c", 7)]
    of_talk = [
        ("set_aside_earlier_run", w),
        *(("prepare_dataset", talk, w, parent), ("one_epoch", "talk", talk, "rows")),
        *(("check_config", w, "talk of 9", "f2"), ("check_data", w, "rows")),
        ("check_tokenizer", planned, "rows", *models),
        ("write_run_identity", w, "talk of 9", "f2", "rows"),
    ]
    assert prepared("talk") == [*of_talk, inherited, ("write", w, "w", "c", 7)]
    steps = [5]
    assert prepared("talk") == of_talk
    assert prepared("texts") == of_texts
    steps, parent, texts.train = [], None, types.SimpleNamespace(num_steps=9, parent="")
    models = ("parent", None), ("teacher", teacher)
    of_texts[2:3] = [("prepare_dataset", data, 2.5, ("padded", False))]
    of_texts[4:5] = [("check_tokenizer", texts, "rows", *models)]
    assert prepared("texts") == [*of_texts, ("inherit", w, None), ("remove", w)]
    index = 1
    assert prepared("texts") == [of_texts[2], of_texts[4]]
    assert prepared("talk") == [
        *(("prepare_dataset", talk, w, None), ("one_epoch", "talk", talk, "rows")),
        ("check_tokenizer", planned, "rows", *models),
    ]


def test_processes_that_share_a_folder_prepare_it_together(monkeypatch):
    """Each process makes a share on its part of the host's cores; the leader begins and ends."""
    events = []

    def note(*args, **options):
        events.append((*args, *options.items()))

    hosts, index, cores = ["a", "b", "a"], 2, 7
    rows = types.SimpleNamespace(path="rows", digest="d", vocab_size=257)

    def patch(owner, name, value):
        return monkeypatch.setattr(owner, name, value)

    patch(preflight.distributed, "count", lambda: len(hosts))
    patch(preflight.distributed, "index", lambda: index)
    patch(preflight.distributed, "gather", lambda *args: note(*args) or hosts)
    patch(preflight.distributed, "check_same_rows", note)
    patch(preflight.distributed, "Team", lambda *args: note(*args) or team)
    patch(preflight.socket, "gethostname", lambda: "own")
    patch(runtime, "cores", lambda: cores)
    patch(preflight.preparation, "inspect_sources", lambda *a, **k: note("look", *a, **k) or corpus)
    patch(preflight.preparation, "begin", lambda *a, **k: note("begin", *a, **k) or partial)
    patch(preflight.preparation_estimate, "check", lambda *a, **k: note("check", *a, **k))
    patch(preflight.prepare, "prepare", lambda *a, **k: note("prepare", *a, **k) or "rows")
    patch(loader, "open_dataset", {"rows": rows}.get)
    team = types.SimpleNamespace(size=3, announce=lambda word: note("announce", word))
    team.wait_for = lambda word, **k: note("wait", word, **k)
    partial = types.SimpleNamespace(
        make=lambda **k: note("make", **k), finish=lambda: note("finish")
    )
    data = DataConfig(source="text", directory="there", tokenizer="byte", vocab_size=257)

    def calls_for(**attributes):
        nonlocal corpus
        corpus = types.SimpleNamespace(**attributes)
        events.clear()
        assert preflight.prepare_dataset(data, 2.5) is rows
        advice = "the same config.data.source, or one they share"
        assert events[:2] == [("data", data.root), ("hosts", "own")]
        assert events[-1] == ("rows", "d", advice)
        return events[2:-1]

    corpus, team.index = None, 0
    shown, finished = ("shown", True), ("announce", "finished")
    own, missing = ("make", ("workers", 3), ("share", (0, 3)), shown), ("make",)
    ready = [("wait", "finished", ("leader", True)), ("prepare", data, ("hours", 2.5), shown)]
    assert calls_for(parts=5) == [
        *(("look", data, shown), ("check", corpus, 9, 2.5, shown), ("begin", corpus, shown)),
        *(("announce", "begun"), own, ("announce", "made")),
        *(("wait", "made"), missing, ("finish",), finished),
        *ready,
    ]
    announcements = [("announce", "begun"), ("announce", "made"), ("wait", "made"), finished]
    assert calls_for(parts=0) == [("look", data, shown), *announcements, *ready]
    team.index, index, cores = 1, 1, 0
    hidden = ("shown", False)
    own = ("make", ("workers", 1), ("share", (1, 3)), hidden)
    begun = [("wait", "begun", ("leader", True)), ("look", data, hidden)]
    ready[1] = ("prepare", data, ("hours", 2.5), hidden)
    assert calls_for(parts=5) == [
        *(*begun, ("begin", corpus, hidden), ("announce", "begun")),
        *(own, ("announce", "made"), *ready),
    ]
    assert calls_for(parts=0) == [*begun, ("announce", "begun"), ("announce", "made"), *ready]
    # Rows that exist, and a single process, need no team.
    for count, source in ((3, "prepared:rows"), (1, "text")):
        monkeypatch.setattr(preflight.distributed, "count", lambda n=count: n)
        events.clear()
        alone = dataclasses.replace(data, source=source)
        preflight.prepare_dataset(alone)
        assert events[0] == ("prepare", alone, ("hours", PREPARE_HOURS)) and len(events) == 2
