"""The scaling table: targets fit their meshes, and the page matches the results."""

import json
import math
import shutil
import subprocess
import sys

import jax
import pytest

from experiments.tables import lab_notes, scaling_table
from kvjax.aot import __main__ as aot
from kvjax.distributed import sharding
from kvjax.foundation import command_line, record_lines
from kvjax.foundation.errors import UserError
from kvjax.hardware import topology
from kvjax.model import parameters
from tests import quick
from tests.experiments import notes

NOTES = {note.name: note for note in notes.every()}
TARGETS = [
    pytest.param(note, target, id=f"{name}-{target.topology}")
    for name, note in NOTES.items()
    for target in note.targets
]


# -- the configs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("note, target", quick.every(12, TARGETS))
def test_mesh_and_batch_divide_over_the_target(note, target):
    run, shape = target.experiment, target.mesh
    assert run.name == note.name and target.topology.partition(":")[0] in topology.SHAPES
    assert tuple(shape) == sharding.AXES
    assert math.prod(shape.values()) == target.chips
    mesh = jax.sharding.AbstractMesh(tuple(shape.values()), sharding.AXES)
    weights = parameters.abstract(run.model)
    sharding.parameter_shardings(mesh, *weights)  # raises if an axis is not divisible
    rows = run.train.batch_size // run.train.grad_accumulation
    assert rows % sharding.batch_shards(mesh) == 0
    assert run.data.sequence_length % (2 * shape["sequence"]) == 0


@pytest.mark.parametrize("note, target", TARGETS)
def test_the_compiler_says_that_it_fits(note, target):
    """A tenth of HBM stays free."""
    found = scaling_table.outcome(note, target)
    assert found.result, f"{found.why}: run `python -m experiments.tables.scaling_table --compile`"
    assert found.result["fits"] and found.result["memory"]["part"] <= 0.9
    assert found.result["mesh"] == target.mesh and not found.result["replicated"]


@pytest.mark.slow
def test_readme_and_lab_notes_say_what_the_results_say():
    changed = scaling_table.differences(scaling_table.written(list(NOTES.values())))
    assert not changed, f"run `python -m experiments.tables.scaling_table`:\n{changed}"


# -- the command, on two configs in a folder of their own ------------------------------------------


LONG = "lrkv_32k_2p5b"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Sets up a root with two configs, a README, no results, and a stand-in compiler."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "experiments" / "reports").mkdir(parents=True)
    for file in ("configs/mha_128m.py", "configs/long_context.py"):
        shutil.copy(scaling_table.ROOT / file, tmp_path / file)
    with (tmp_path / "configs/long_context.py").open("a") as file:
        file.write(f'VARIANTS = {{"{LONG}": VARIANTS["{LONG}"]}}\n')
    page = tmp_path / "experiments" / "reports" / "configs.md"
    page.write_text(f"before\n{scaling_table.BEGIN}\nold\n{scaling_table.END}\nafter\n")
    (tmp_path / "experiments" / "results").mkdir()
    results = tmp_path / "experiments" / "results" / "aot.jsonl"
    for name, path in dict(ROOT=tmp_path, RESULTS=results, PAGE=page).items():
        monkeypatch.setattr(scaling_table, name, path)
    read_all = lab_notes.read_all
    monkeypatch.setattr(lab_notes, "read_all", lambda: read_all(tmp_path / "configs"))
    monkeypatch.setattr(scaling_table, "_command", _answer)
    monkeypatch.setattr(scaling_table.variants, "markdown", lambda: "| variants |\n")
    assert _run() == 0  # nothing was compiled before
    assert _line(tmp_path / "configs/mha_128m.py") == "At least: not known, not compiled yet."
    return tmp_path


def _result(note, target, **changes):
    """Returns a result like `kvjax.aot`'s, with round numbers."""
    part = changes.pop("part", 0.5)
    return (
        dict(
            config=note.name,
            topology=target.topology,
            fits=part <= 0.9,
            memory=dict(total=47_500_000_000, part=part),
            memory_is_upper_bound=False,
            collectives=[
                dict(kind="all-gather", scope="mlp", wire_bytes=1.25e9),
                dict(kind="reduce-scatter", scope="mlp", wire_bytes=2e9),
                dict(kind="all-gather", scope="muon", wire_bytes=0.5e9),
                dict(kind="all-reduce", scope="loss", wire_bytes=4e6),
            ],
            bound=dict(mfu=0.6543, by="compute", seconds=5.5922),
        )
        | changes
    )


def _answer(note, target, resolved=None):
    """Returns a command that saves a result and prints, like `python -m kvjax.aot --save=FILE`."""
    name = aot.result_name(note.name, target.topology)
    code = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + chr(10))"
    result = _result(note, target, resolved=resolved or target.resolved)
    line = json.dumps({"name": name} | result)
    return [sys.executable, "-c", code, str(scaling_table.RESULTS), line]


def _put(note, target, result):
    record_lines.put(scaling_table.RESULTS, aot.result_name(note.name, target.topology), result)


def _run(*options):
    return command_line.status(scaling_table.main, options)


def _line(path):
    (line,) = [t for t in path.read_text().splitlines() if t.startswith("At least")]
    return line


def test_compile_then_write_then_check(root, capsys):
    short, long = root / "configs/mha_128m.py", root / "configs/long_context.py"
    page = root / "experiments" / "reports" / "configs.md"
    before, variants = short.read_text(), long.read_text()
    assert "not compiled yet" in page.read_text()
    capsys.readouterr()
    assert _run("--compile", "--only=*32k*") == 0
    out = capsys.readouterr().out
    assert out.startswith("1 of 1 to compile\n1/1 lrkv_32k_2p5b on v5p:2x2x4: ")
    assert out.endswith("s, 50.0% of HBM\nall compiled, and all fit\n")
    assert _run("--check") == 1
    out = capsys.readouterr().out
    assert "experiments/reports/configs.md (is)" in out and "At least" not in out
    assert _run() == 0
    assert _line(short) == "At least: not known, not compiled yet."
    text = page.read_text()
    assert text.startswith(f"before\n{scaling_table.BEGIN}\n\n| config |")
    assert text.endswith(f"|\n\n{scaling_table.END}\nafter\n")
    assert (
        "| [lrkv_32k_2p5b](../../configs/long_context.py) | 2,435,973,120 | 186,912 "
        "| v5p:2x2x4 | fsdp 8 x sequence 2 | dots | 1 | 47.5 | 50.0% | 46.325 "
        "| all-gather 1.75, reduce-scatter 2.00 | 65.4% | 42.4% | compute | 12.35 | 2,316 |\n"
    ) in text
    assert _run("--check") == 0
    (line,) = [t for t in text.splitlines() if "[mha_128m]" in t]
    assert line.split(" | ")[7:9] == ["not compiled yet", ""]
    assert _run("--compile") == _run() == 0
    line = (
        "At least 12.35 days for 104 exaFLOPs: at most 58.3% MFU without masked keys, bound by "
        "compute."
    )
    assert short.read_text() == before.replace("At least: not known, not compiled yet.", line)
    assert long.read_text() == variants


def test_several_targets(root):
    """The table has a line for each; the lab note's least time is of the first."""
    shutil.copy(NOTES["lrkv_2p5b"].path, root / "configs")
    note = lab_notes.read(root / "configs" / "lrkv_2p5b.py")
    for days, target in enumerate(note.targets, start=1):
        bound = dict(mfu=0.5, by="hbm", seconds=days * 86_400 / note.experiment.train.num_steps)
        result = _result(note, target, bound=bound, resolved=target.resolved)
        _put(note, target, result)
    assert _run() == 0
    assert _line(note.path).startswith("At least 1.00 days for 787 exaFLOPs: ")
    lines = (root / "experiments" / "reports" / "configs.md").read_text().splitlines()
    cells = [line.split(" | ") for line in lines if "[lrkv_2p5b]" in line]
    assert [(c[3], c[4], c[-2]) for c in cells] == [
        ("v5p:2x2x4", "fsdp 16", "1.00"),
        ("v4:4x4x4", "data 4 x fsdp 16", "2.00"),
        ("v5e:8x8", "data 4 x fsdp 16", "3.00"),
        ("h200:8", "fsdp 8", "4.00"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, stale",
    [
        ('"mha_128m", scale', '"mha_128m", mesh=dict(data=2), scale', True),
        ('"mha_128m", scale', '"mha_128m", data=dict(text_key="body"), scale', False),
        ("Measured: nothing yet.", "Measured: 3 days.", False),
    ],
)
def test_a_result_is_valid_while_its_step_is_unchanged(root, capsys, old, new, stale):
    assert _run("--compile") == _run() == _run("--check") == 0
    path = root / "configs/mha_128m.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert _run("--check") == int(stale)
    assert ("changed since it was compiled" in capsys.readouterr().out) == stale
    assert _run("--compile") == 0
    assert f"{int(stale)} of 2 to compile" in capsys.readouterr().out


def test_a_result_without_the_targets_overrides_does_not_count(root):
    note = NOTES["lrkv_2p5b"]
    plain, split = note.targets[:2]
    assert "mesh.data = 4" in split.resolved and split.resolved != plain.resolved
    _put(note, split, _result(note, split, resolved=plain.resolved))
    assert scaling_table.outcome(note, split).result is None
    _put(note, split, _result(note, split, resolved=split.resolved))
    assert scaling_table.outcome(note, split).result["topology"] == split.topology


def test_failures_are_listed_and_the_rest_goes_on(root, monkeypatch, capsys):
    fail = [sys.executable, "-c", "import sys; sys.exit('kvjax: no room\\non this chip')"]

    def answer(note, target):
        return fail if "128m" in note.name else _answer(note, target)

    monkeypatch.setattr(scaling_table, "_command", answer)
    assert _run("--compile") == 1
    out = capsys.readouterr().out
    assert "1/2 mha_128m on v5e:4x4: 0 s, status 1: on this chip" in out
    assert "2/2 lrkv_32k_2p5b on v5p:2x2x4: " in out
    assert out.endswith("of HBM\nmha_128m on v5e:4x4: not compiled yet\n")


def test_a_config_that_does_not_fit_is_marked(root, monkeypatch, capsys):
    note = lab_notes.read(root / "configs/mha_128m.py")
    (target,) = note.targets
    changes = dict(part=0.973, memory_is_upper_bound=True, resolved=target.resolved)
    _put(note, target, _result(note, target, **changes))
    assert _run("--compile", "--only=mha*") == 1
    assert capsys.readouterr().out.endswith("mha_128m on v5e:4x4: does not fit, 97.3% of HBM\n")
    assert _run() == 0
    assert _line(note.path).endswith("bound by compute; does not fit, 97.3% of HBM.")
    assert (
        "| ≤ 47.5 | **≤ 97.3%: does not fit** |"
        in (root / "experiments/reports/configs.md").read_text()
    )


def test_the_command_is_aots():
    def command(name, i):
        return scaling_table._command(NOTES[name], NOTES[name].targets[i])

    program = (sys.executable, "-m", "kvjax.aot")
    save = "--save=experiments/results/aot.jsonl"
    config = "--config=configs/ranks.py:lrkv_r8_128m"
    assert command("lrkv_r8_128m", 0) == [*program, config, "--topology=v5e:4x4", save]
    config = ("--config=configs/mha_2p5b.py", "--config.mesh.data=4")
    assert command("mha_2p5b", 1) == [*program, *config, "--topology=v4:4x4x4", save]
    assert aot.result_name("x_128m", "v5e:4x4") == "x_128m_v5e_4x4"


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("(16 chips)", "(8 chips)", r"target 'v5e:4x4 \(8 chips\).': must be like"),
        ("(16 chips)", "(16 chips, data=4)", r"chips, data=4\).': must be like"),
        ("Target:", "Hardware:", "needs one line like 'Target: v5p:2x2x4"),
        ("At least", "Perhaps", "must have .*At least.* once"),
    ],
)
def test_a_lab_note_that_cannot_be_read(root, capsys, old, new, message):
    path = root / "configs/mha_128m.py"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=f"mha_128m.py: .*{message}"):
        scaling_table.written(lab_notes.read_all())
    assert _run("--check") == 2
    assert capsys.readouterr().err.startswith("kvjax: ")


def test_a_pattern_that_matches_nothing(root, capsys):
    assert _run("--compile", "--only=mah*") == 2
    assert capsys.readouterr().err.startswith("kvjax: --only=mah*: matches no config")


@pytest.mark.aot
def test_a_saved_result_equals_a_new_compilation():
    """Compares one config; its saved result does not follow changes of the program."""
    note = NOTES["lrkv_128m"]
    (target,) = note.targets
    saved = scaling_table.outcome(note, target).result
    command = scaling_table._command(note, target)[:-1]  # without --save
    done = subprocess.run(
        [*command, "--json"], cwd=scaling_table.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    now = json.loads(done.stdout)
    assert now["memory"]["total"] == pytest.approx(saved["memory"]["total"], rel=0.01)
    assert now["wire_bytes"] == pytest.approx(saved["wire_bytes"], rel=0.01)
    assert now["bound"]["seconds"] == pytest.approx(saved["bound"]["seconds"], rel=0.01)
