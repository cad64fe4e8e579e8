"""The command line, from a trained workdir to text, and everything that can be wrong with both."""

import gc
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import weakref

from etils import epath
from flax import nnx
import jax
import numpy as np
from orbax.checkpoint import v1 as ocp
import pytest

from kvjax import generate as generate_lib
from kvjax.decoding.generator import Generator
from kvjax.decoding.sampling import Sampling
from kvjax.decoding.text import generate
from kvjax.foundation import command_line
from kvjax.foundation import progress
from kvjax.foundation import runtime
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from kvjax.training import loop
from kvjax.workdir.trained import experiment_of
from kvjax.workdir.trained import load
from tests import quick
from tests import runs

STEPS = 10


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run of 10 steps, with checkpoints of steps 8 and 10; its prepared data is gone."""
    folder = tmp_path_factory.mktemp("trained")
    config = runs.small_config(
        *(runs.write_text(folder / "text.txt"), str(folder / "data")),
        **dict(num_steps=STEPS, checkpoint_every=4, eval_rows=8, sample_tokens=4),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:1])
        loop.train(config, epath.Path(folder / "run"))
    shutil.rmtree(folder / "data")
    return folder / "run"


@pytest.fixture(scope="module")
def loaded(workdir):
    return load(epath.Path(workdir))


@pytest.fixture(scope="module")
def generator(loaded):
    return Generator(loaded.model, loaded.compute)


@pytest.fixture
def copy(workdir, tmp_path):
    """A copy of the workdir, to be broken."""
    return pathlib.Path(shutil.copytree(workdir, tmp_path / "copy"))


@pytest.fixture
def run(workdir, capsys, monkeypatch):
    """A function of flags: (exit status, standard output, standard error) of the command line."""
    monkeypatch.setattr(runtime, "start", lambda: None)  # the tests' own cache stays
    monkeypatch.setattr(progress, "FIRST_SECONDS", 1e6)  # a busy machine's waits are no message

    def command(*given, workdir=workdir):
        arguments = [f"--workdir={workdir}", "--num_tokens=6", *given]
        return command_line.status(generate_lib.main, arguments), *capsys.readouterr()

    return command


@pytest.fixture
def warm(run, loaded, generator, monkeypatch):
    """As `run`, of a model that is read and compiled."""
    monkeypatch.setattr(generate_lib, "load", lambda *args, **options: loaded)
    monkeypatch.setattr(generate_lib, "Generator", lambda *args, **options: generator)
    return run


# -- loading ---------------------------------------------------------------------------------------


def test_a_workdir_is_all_that_is_needed(workdir, loaded):
    path = workdir / "checkpoints" / str(STEPS)
    state = ocp.load(path, checkpointable_name="state")
    got = [np.asarray(x) for x in jax.tree.leaves(nnx.state(loaded.model))]
    want = [np.asarray(x) for x in jax.tree.leaves(state["params"])]
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert loaded.step == STEPS and loaded.context == 32
    assert loaded.tokenizer.encode("a") == [97]


def test_an_earlier_step(workdir, loaded, monkeypatch):
    monkeypatch.chdir(workdir.parent)
    earlier = load(epath.Path(workdir.name), step=8)
    embeddings = [np.asarray(m.embedding[...]) for m in (loaded.model, earlier.model)]
    assert np.any(embeddings[0] != embeddings[1])


def test_weights_come_in_the_dtype_asked_for(workdir):
    half = load(epath.Path(workdir), dtype="bfloat16")
    assert {str(x.dtype) for x in jax.tree.leaves(nnx.state(half.model))} == {"bfloat16"}
    assert half.compute.dtype == np.dtype("bfloat16")


def test_the_sample_of_training_is_what_its_checkpoint_generates(workdir, loaded, generator):
    options = dict(num_tokens=4, seed=0, end_at_special=False)
    result = generate(generator, loaded.tokenizer, ["The king "], **options)
    assert (workdir / "sample.txt").read_text() == f"The king {result.texts[0]}\n"


def test_a_loaded_model_is_compiled_once(loaded):
    """Its weights are bound to a device, and with them whatever a step returns."""
    generator = Generator(loaded.model, loaded.compute)
    generate(generator, loaded.tokenizer, ["The king "], num_tokens=3)
    assert [f._cache_size() for f in (generator.engine.prefill, generator.engine.decode_step)] == [
        1,
        1,
    ]


# -- text ------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_work_too(loaded, generator):
    options = dict(num_tokens=20, sampling=Sampling(temperature=0.0))
    make = lambda **keys: generate(generator, loaded.tokenizer, ["a", "bc"], **options, **keys)
    free = make()
    stop = free.texts[0][2]
    cut = make(stop=[stop])
    assert cut.texts[0] == free.texts[0][: free.texts[0].index(stop)]
    assert cut.tokens[0] == free.tokens[0][: len(cut.texts[0]) + 1]


def test_special_tokens_end_a_text(loaded):
    """A model in which every token is followed by BOS."""
    bos = loaded.tokenizer.bos_id
    graph, params = nnx.split(loaded.model)
    params = nnx.to_pure_dict(params)
    params["head"] = np.zeros_like(params["head"])
    params["head"][0, bos] = 1e3
    # Activations are all but the embedding's first channel, which is the same for every token.
    params["embedding"] = np.zeros_like(params["embedding"])
    params["embedding"][:, 0] = 1e3
    for segment in params["segments"].values():
        segment["attention"]["out"] = np.zeros_like(segment["attention"]["out"])
        segment["mlp"]["down"] = np.zeros_like(segment["mlp"]["down"])
    model = nnx.merge(graph, jax.tree.map(jax.numpy.asarray, params))
    generator = Generator(model, loaded.compute)
    options = dict(num_tokens=3, sampling=Sampling(temperature=0.0))
    assert generate(generator, loaded.tokenizer, ["a", "b"], **options).texts == ["", ""]
    options["end_at_special"] = False
    assert generate(generator, loaded.tokenizer, ["a"], **options).texts == ["<|bos|>" * 3]


# -- the command line ------------------------------------------------------------------------------


def test_one_prompt(run, loaded, generator):
    status, out, err = run("--prompt=The king ", "--seed=3")
    result = generate(generator, loaded.tokenizer, ["The king "], num_tokens=6, seed=3)
    assert (status, out) == (0, f"The king {result.texts[0]}\n")
    assert run("--prompt=The king ", "--seed=4")[1] != out
    assert re.fullmatch(
        r"kvjax: first token after [\d.,]+ ms, then [\d,]+ tokens/s \(without the [\d.]+ s of "
        r"compiling before\); cache 51,200 bytes = 1 x 128 tokens x 400\n",
        err,
    ), err


@pytest.mark.slow
def test_a_cache_on_several_chips(run):
    alone, split = (run("--prompt=the ", f"--chips={n}", "--temperature=0") for n in (1, 2))
    assert alone[:2] == split[:2] and split[0] == 0
    held = re.search(r"cache ([\d,]+) bytes = 1 x 256 tokens.*, ([\d,]+) on each chip", split[2])
    whole, each = (int(group.replace(",", "")) for group in held.groups())
    assert whole == 2 * each and "chip" not in alone[2]


def test_text_appears_as_it_comes(warm, monkeypatch):
    written = []
    real = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: written.append(text) or real(text))
    monkeypatch.setattr(sys.stdout, "flush", lambda: written.append("flush"))
    assert warm("--prompt=The ", "--temperature=0")[0] == 0
    pieces = [piece for piece in "".join(written).split("flush") if piece]
    assert pieces[0].startswith("The ") and len(pieces) >= 4


def test_several_prompts_are_numbered(run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"two\r\n three words\n")
    status, out, _ = run("--prompt=one", f"--prompt_file={file}")
    assert status == 0
    assert re.match(r"--- 1 ---\none.*\n--- 2 ---\ntwo.*\n--- 3 ---\n three words", out, re.S)
    assert "\r" not in out
    alone = run("--prompt= three words")[1]
    assert out.endswith(f"--- 3 ---\n{alone}")


def test_the_first_of_several_prompts_appears_as_it_comes(capsys):
    shown = generate_lib._Shown(["a", "b", "c"], progress.waiting("a test").__enter__())
    texts = []
    for call in (
        lambda: shown.add(0, "1"),
        lambda: shown.add(1, "x"),
        lambda: shown.end(1),  # before the first one
        lambda: shown.add(2, "y"),
        lambda: shown.add(0, "2"),
        lambda: shown.end(0),
        lambda: shown.add(2, "z"),
        lambda: shown.end(2),
    ):
        call()
        texts.append(capsys.readouterr().out)
    *before, last = texts
    assert before == ["--- 1 ---\na1", "", "", "", "2", "\n--- 2 ---\nbx\n--- 3 ---\ncy", "z"]
    assert last == "\n"


def test_stop_strings(warm):
    free = warm("--prompt=The king ", "--num_tokens=20", "--temperature=0")[1]
    text = free.removeprefix("The king ").removesuffix("\n")
    stop = text[3:5]
    status, out, _ = warm(
        "--prompt=The king ", "--num_tokens=20", "--temperature=0", f"--stop={stop}", "--stop=%%"
    )
    assert (status, out) == (0, f"The king {text[: text.index(stop)]}\n")
    never = warm("--prompt=The king ", "--num_tokens=20", "--temperature=0", "--stop=%%")
    assert never[1] == free


def test_a_stop_token(warm):
    free = warm("--prompt=The king ", "--temperature=0")[1]
    token = free.removeprefix("The king ").encode()[2]
    out = warm("--prompt=The king ", "--temperature=0", f"--stop_token={token}")[1]
    assert out == free[: free.index(chr(token), len("The king "))] + "\n"


def test_beyond_the_context_of_training_there_is_a_warning(run):
    prompt = "--prompt=" + "x" * 22  # and BOS
    assert len(run(prompt, "--num_tokens=10")[2].splitlines()) == 1
    status, out, err = run(prompt, "--num_tokens=11")
    assert status == 0 and out.startswith("x" * 22)
    assert "a prompt of 23 tokens and 11 to generate go past the 32 tokens" in err


@pytest.mark.slow
def test_a_process_with_prompts_on_standard_input(workdir):
    command = [sys.executable, "-m", "kvjax.generate", f"--workdir={workdir}", "--num_tokens=3"]
    options = dict(
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": quick.XLA_FLAGS},
        capture_output=True,
        timeout=240,
        check=False,
    )
    done = subprocess.run([*command, "--prompt_file=-"], input="é\nb\n".encode(), **options)
    assert done.returncode == 0, done.stderr.decode()
    assert re.match("--- 1 ---\né.*\n--- 2 ---\nb", done.stdout.decode(), re.S)
    assert all(line.startswith(b"kvjax: ") for line in done.stderr.splitlines())
    with subprocess.Popen(
        [*command[:-1], "--num_tokens=900", "--prompt=a"],
        **{k: options[k] for k in ("cwd", "env")},
        **dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE),
    ) as left:  # as `| head -c 1` does
        assert left.stdout.read(1) == b"a"
        left.stdout.close()
        assert b"Traceback" not in left.stderr.read() and left.wait(240) == 1
    wrong = subprocess.run([*command, "--prompts=a"], **options)
    assert wrong.returncode == 2 and b"Traceback" not in wrong.stderr
    assert wrong.stderr.startswith(b"kvjax: unknown option --prompts; did you mean '--prompt'?")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no prompt: give text, as in --prompt='The king ', or --prompt_file=FILE"),
        (["--prompt="], "--prompt='' is empty: give text"),
        (["--prompt=a", "--prompt="], "--prompt='' is empty"),
        (["--prompt=\udcff"], "is not UTF-8 text"),
        (["--prompt_file=/nowhere/x"], "--prompt_file=/nowhere/x cannot be read: No such file"),
        (["--prompt=a", "--num_tokens=0"], "num_tokens = 0: must be at least 1"),
        (["--prompt=a", "--num_tokens=many"], "--num_tokens=many: must be a whole number"),
        (["--prompt=a", "--temperature=-1"], "temperature = -1.0: must be a number, 0"),
        (["--prompt=a", "--temperature=nan"], "temperature = nan"),
        (["--prompt=a", "--top_k=-2"], "top_k = -2"),
        (["--prompt=a", "--top_p=0"], "top_p = 0.0: must be above 0"),
        (["--prompt=a", "--top_p=1.5"], "top_p = 1.5"),
        (["--prompt=a", "--seed=-1"], "seed = -1"),
        (["--prompt=a", "--stop="], "a stop string is empty"),
        (["--prompt=a", "--stop_token=257"], "stop token 257: no such id; the vocabulary has 257"),
        (["--prompt=abcdef", "--capacity=6"], "prompt 1 has 7 tokens and capacity = 6"),
        (["--prompt=abc", "--capacity=6"], "sequence 1 holds 4 tokens and 5 more are to come"),
        (["--prompt=a", "--step=9"], "step = 9: .* has no such checkpoint; it has [8, 10]"),
        (
            ["--prompt=a", "--chips=2", "--implementation=gpu"],
            "'gpu': reads a whole cache.*2 chips",
        ),
        (["--prompt=a", "--dtype=int8"], "dtype = 'int8': must be one of 'auto'"),
        (["--prompt=a", "--dtype=float64"], "set JAX_ENABLE_X64=1"),
        (["--prompt=a", "--implementation=fast"], "implementation = 'fast': must be one of"),
        (["--prompt=a", "--workdir="], "--workdir is missing"),
        (["--prompt=a", "--workdir=/nowhere/x"], "/nowhere/x is no workdir of a run"),
        (["--prompt", "a", "b"], "unknown argument 'b'"),
    ],
)
def test_what_cannot_be_asked(run, given, message):
    status, out, err = run(*given)
    assert (status, out) == (2, "")
    assert err.startswith("kvjax: ") and "Traceback" not in err
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    assert re.search(pattern, err), err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--num_tokens=0", "num_tokens = 0"),
        ("--seed=-1", "seed = -1"),
        ("--seed=4294967296", "seed = 4294967296: must be below"),
        ("--capacity=-1", "capacity = -1"),
        ("--stop=", "a stop string is empty"),
        ("--temperature=-1", "temperature = -1"),
        ("--implementation=fast", "implementation = 'fast'"),
        ("--chips=0", "chips = 0: must be at least 1"),
        ("--chips=9", "chips = 9: there are 8 (cpu:0, cpu:1, "),
    ],
)
def test_options_are_looked_at_before_weights_are(run, monkeypatch, given, message):
    monkeypatch.setattr(generate_lib, "load", lambda *a, **k: pytest.fail("loaded"))
    status, out, err = run("--prompt=a", given)
    assert (status, out) == (2, "") and err.startswith((f"kvjax: --{message}", f"kvjax: {message}"))


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError, ValueError])
def test_a_device_out_of_memory(run, monkeypatch, error):
    def full(*args, **options):
        raise error("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 bytes.\nMore.")

    monkeypatch.setattr(generate_lib, "generate", full)
    status, out, err = run("--prompt=a")
    assert (status, out) == (2, "")
    assert err == (
        "kvjax: out of memory (RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 bytes.)"
        ": give fewer prompts at once, a smaller --num_tokens or a smaller --capacity\n"
    )
    monkeypatch.setattr(generate_lib, "generate", lambda *a, **k: int("no number"))
    with pytest.raises(ValueError, match="no number"):
        run("--prompt=a")


def test_weights_are_held_once(run, monkeypatch):
    """While text is made, those that were loaded are gone: the generator has its own."""
    arrays, real = [], generate_lib.load

    def load(*args, **options):
        loaded = real(*args, **options)
        arrays.extend(weakref.ref(x) for x in jax.tree.leaves(nnx.state(loaded.model)))
        return loaded

    def generate(*args, **options):
        gc.collect()
        assert arrays and all(array() is None for array in arrays)
        raise UserError("seen")

    monkeypatch.setattr(generate_lib, "load", load)
    monkeypatch.setattr(generate_lib, "generate", generate)
    assert run("--prompt=a")[2] == "kvjax: seen\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1 is blank"),
        (b"one\n\nthree\n", "line 2 is blank: one prompt per line"),
        (b"one\n  \n", "line 2 is blank"),
        (b"\xff\n", "is not UTF-8 text"),
    ],
)
def test_files_of_prompts_that_cannot_be(run, tmp_path, content, message):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    status, out, err = run(f"--prompt_file={file}")
    assert (status, out) == (2, "") and message in err and str(file) in err


def test_a_byte_order_mark_is_no_prompt(tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    assert generate_lib.read_prompts([], str(tmp_path / "prompts.txt")) == ["one", "two"]


@pytest.mark.parametrize("file", ["hdfs://host/prompts.txt", "s3://bucket/prompts.txt"])
def test_a_file_of_prompts_that_nothing_opens(file):
    with pytest.raises(UserError, match=f"^--prompt_file = '{file}': "):
        generate_lib.read_prompts([], file)


def expect(run, workdir, *messages):
    status, out, err = run("--prompt=a", workdir=workdir)
    assert (status, out) == (2, "") and "Traceback" not in err
    for message in messages:
        assert message in err, err


def test_a_workdir_without_a_checkpoint(run, copy):
    shutil.rmtree(copy / "checkpoints")
    expect(run, copy, "has no checkpoint yet")
    assert not (copy / "checkpoints").exists()  # looking made nothing


def test_a_checkpoint_being_written_is_left_alone(run, copy):
    unfinished = copy / "checkpoints" / "12.orbax-checkpoint-tmp"
    (unfinished / "state").mkdir(parents=True)
    assert run("--prompt=a", workdir=copy)[0] == 0
    assert unfinished.exists()


def test_a_checkpoint_of_another_architecture(run, copy, tmp_path):
    config = json.loads((copy / "config.json").read_text())
    config["attention"]["rank"] = 8
    (copy / "config.json").write_text(json.dumps(config))
    name = "segments.0.attention.mechanism.expand_key: checkpoint (2, 2, 4, 16)"
    expect(run, copy, "holds another model", name, "config (2, 2, 8, 16)")
    config["attention"].update(rank=0)
    (copy / "config.json").write_text(json.dumps(config))
    expect(run, copy, "holds another model", "expand_key: checkpoint (2, 2, 4, 16), config none")


def test_a_config_that_cannot_be_read(run, copy):
    config = json.loads((copy / "config.json").read_text())
    config["model"]["d_modle"] = 3
    (copy / "config.json").write_text(json.dumps(config))
    expect(run, copy, "config.json: config.model.d_modle: no such key")
    del config["model"]["d_modle"]
    (copy / "config.json").write_text(json.dumps(config | {"attention": 3}))
    expect(run, copy, "config.json: 'int' object")
    (copy / "config.json").write_text("[1]")
    expect(run, copy, "config.json describes no run")
    (copy / "config.json").write_text("{")
    expect(run, copy, "config.json is not JSON")


def test_a_checkpoint_that_cannot_be_read(run, copy):
    for file in (copy / "checkpoints" / "10" / "state").rglob("d/*"):
        file.write_bytes(b"\0" * file.stat().st_size)
    expect(run, copy, "checkpoints/10 cannot be read", "other checkpoints there: steps [8]")
    assert run("--prompt=a", "--step=8", workdir=copy)[0] == 0


def test_the_tokenizer_of_a_workdir(run, copy):
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | dict(id=257, content="<x>"))
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    expect(run, copy, "tokenizer.json has 258 tokens, the model 257")
    (copy / "tokenizer.json").write_text("{}")
    expect(run, copy, "is not a tokenizer.json")
    (copy / "tokenizer.json").unlink()
    expect(run, copy, "tokenizer.json is missing: run the command that trained")


def test_one_string_is_no_list_of_them(loaded, generator):
    make = lambda prompts, **stop: generate(
        generator, loaded.tokenizer, prompts, num_tokens=2, **stop
    )
    with pytest.raises(UserError, match="prompts = 'ab' is one string: give a list"):
        make("ab")
    with pytest.raises(UserError, match="stop = 'x' is one string: give a list"):
        make(["ab"], stop="x")


def test_what_a_workdir_was_trained_with(workdir):
    experiment = experiment_of(epath.Path(workdir))
    assert experiment.data.sequence_length == 32
    assert experiment.data.source == str(workdir.parent / "text.txt")


def test_loading_raises_what_the_command_line_prints(copy):
    with pytest.raises(UserError, match="is no workdir"):
        load(epath.Path(copy / "checkpoints"))
