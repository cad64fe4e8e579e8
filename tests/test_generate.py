"""python -m kvjax.generate: from prompts to streamed text, and errors of options and files."""

import gc
import os
import re
import subprocess
import sys
import weakref

from flax import nnx
import jax
import numpy as np
import pytest

from kvjax import generate as generate_lib
from kvjax.decoding.generator import Generator
from kvjax.decoding.text import generate
from kvjax.foundation import progress
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from tests import quick, trained_run


@pytest.fixture(scope="module")
def generator(loaded):
    return Generator(loaded.model, loaded.compute)


@pytest.fixture
def run(workdir, capsys, monkeypatch):
    """A function of flags: (exit status, standard output, standard error) of the command line."""
    return trained_run.command_line_of(workdir, capsys, monkeypatch)


@pytest.fixture
def warm(run, loaded, generator, monkeypatch):
    """Returns `run` with a model that is loaded and compiled already."""
    monkeypatch.setattr(generate_lib, "start_loading", lambda *args, **options: lambda: loaded)
    monkeypatch.setattr(generate_lib, "Generator", lambda *args, **options: generator)
    return run


def test_one_prompt(run, workdir, loaded, generator, monkeypatch):
    def compiled(model, compute, *, implementation, mesh, stored):
        weights = [jax.tree.leaves(nnx.state(each)) for each in (model, loaded.model)]
        assert all(np.array_equal(one, other) for one, other in zip(*weights, strict=True))
        assert (compute, implementation, mesh, stored) == (loaded.compute, None, None, True)
        return generator

    monkeypatch.setattr(generate_lib, "Generator", compiled)
    status, out, err = run("--prompt=The king ", "--seed=3")
    result = generate(generator, loaded.tokenizer, ["The king "], num_tokens=6, seed=3)
    assert (status, out) == (0, f"The king {result.texts[0]}\n")
    assert run("--prompt=The king ", "--seed=4")[1] != out
    sample = (workdir / "sample.txt").read_text()  # of training
    assert run("--prompt=The king ", "--num_tokens=4")[:2] == (0, sample)
    assert re.fullmatch(
        r"kvjax: first token after [\d.,]+ ms, then [\d,]+ tokens/s \(without the [\d.]+ s of "
        r"compiling before\); cache 51,200 bytes = 1 x 128 tokens x 400 in float32\n",
        err,
    ), err


@pytest.mark.slow
def test_a_cache_on_several_chips(run):
    alone, split = (run("--prompt=the ", f"--chips={n}", "--temperature=0") for n in (1, 2))
    assert alone[:2] == split[:2] and split[0] == 0
    sizes = re.search(r"cache ([\d,]+) bytes = 1 x 256 tokens.*, ([\d,]+) on each chip", split[2])
    whole, per_chip = (int(group.replace(",", "")) for group in sizes.groups())
    assert whole == 2 * per_chip and "chip" not in alone[2]


def test_text_is_streamed(warm, monkeypatch):
    written = []
    real = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: written.append(text) or real(text))
    monkeypatch.setattr(sys.stdout, "flush", lambda: written.append("flush"))
    assert warm("--prompt=The ", "--temperature=0")[0] == 0
    pieces = [piece for piece in "".join(written).split("flush") if piece]
    assert pieces[0].startswith("The ") and len(pieces) >= 4


@pytest.mark.slow
def test_several_prompts_are_numbered(warm, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"two\r\n three words\n")
    status, out, _ = warm("--prompt=one", f"--prompt_file={file}")
    assert status == 0
    assert re.match(r"--- 1 ---\none.*\n--- 2 ---\ntwo.*\n--- 3 ---\n three words", out, re.S)
    assert "\r" not in out
    alone = warm("--prompt= three words")[1]
    assert out.endswith(f"--- 3 ---\n{alone}")


def test_ordered_output(capsys):
    shown = generate_lib._OrderedOutput(["a", "b", "c"], progress.waiting("a test").__enter__())
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


def test_stop_tokens(warm, loaded, monkeypatch):
    """Ends at --stop_token, and at the tokenizer's end tokens."""
    free = warm("--prompt=The king ", "--temperature=0")[1]
    token = free.removeprefix("The king ").encode()[2]
    ended = free[: free.index(chr(token), len("The king "))] + "\n"
    assert warm("--prompt=The king ", "--temperature=0", f"--stop_token={token}")[1] == ended
    monkeypatch.setattr(loaded.tokenizer, "ends", (token,))
    assert warm("--prompt=The king ", "--temperature=0")[1] == ended
    assert warm("--prompt=The king ", "--temperature=0", "--no-end_at_special")[1] == free


@pytest.mark.slow
def test_warns_beyond_the_training_context(run, generator, monkeypatch):
    prompt = "--prompt=" + "x" * 22  # and BOS
    with monkeypatch.context() as patched:
        patched.setattr(generate_lib, "Generator", lambda *args, **options: generator)
        assert len(run(prompt, "--num_tokens=10")[2].splitlines()) == 1
    status, out, err = run(prompt, "--num_tokens=11")
    assert status == 0 and out.startswith("x" * 22)
    assert "a prompt of 23 tokens and 11 to generate go past the 32 tokens" in err


def test_reports_special_tokens_in_a_prompt(warm):
    status, _, err = warm("--prompt=<|bos|>a", "--num_tokens=2")
    assert status == 0
    assert "special tokens in a prompt are read as the characters they are made of: <|bos|>" in err
    assert "special tokens" not in warm("--prompt=<|bo|>", "--num_tokens=2")[2]


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
    ) as reader:  # as `| head -c 1` does
        assert reader.stdout.read(1) == b"a"
        reader.stdout.close()
        assert b"Traceback" not in reader.stderr.read() and reader.wait(240) == 1
    wrong = subprocess.run([*command, "--prompts=a"], **options)
    assert wrong.returncode == 2 and b"Traceback" not in wrong.stderr
    assert wrong.stderr.startswith(b"kvjax: unknown option --prompts; did you mean '--prompt'?")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no prompt: give text, as in --prompt='The king ', or --prompt_file=FILE"),
        (["--prompt="], "--prompt='' is empty: give text"),
        (["--prompt=\udcff"], "is not UTF-8 text"),
        (["--prompt_file=/nowhere/x"], "--prompt_file=/nowhere/x cannot be read: No such file"),
        (["--prompt=a", "--num_tokens=many"], "--num_tokens=many: must be a whole number"),
        (["--prompt=a", "--top_k=-2"], "top_k = -2"),
        (["--prompt=a", "--top_p=0"], "top_p = 0.0: must be above 0"),
        (["--prompt=a", "--stop_token=257"], "stop token 257: no such id; the vocabulary has 257"),
        (["--prompt=abcdef", "--capacity=6"], "prompt 1 has 7 tokens and capacity = 6"),
        (["--prompt=abc", "--capacity=6"], "sequence 1 holds 4 tokens and 5 more follow"),
        (["--prompt=a", "--step=9"], "step = 9: .* has no such checkpoint; it has [30, 40]"),
        (
            ["--prompt=a", "--chips=2", "--implementation=gpu"],
            "'gpu': reads a whole cache.*2 chips",
        ),
        (["--prompt=a", "--dtype=int8"], "dtype = 'int8': must be one of 'auto'"),
        (["--prompt=a", "--dtype=float64"], "set JAX_ENABLE_X64=1"),
        (["--prompt=a", "--workdir="], "--workdir is missing"),
        (["--prompt=a", "--workdir=/nowhere/x"], "/nowhere/x is no workdir of a run"),
        (["--prompt", "a", "b"], "unknown argument 'b'"),
    ],
)
def test_bad_options(run, flags, message):
    status, out, err = run(*flags)
    assert (status, out) == (2, "")
    assert err.startswith("kvjax: ") and "Traceback" not in err
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    assert re.search(pattern, err), err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--num_tokens=0", "num_tokens = 0"),
        ("--seed=-1", "seed = -1"),
        ("--capacity=-1", "capacity = -1"),
        ("--stop=", "a stop string is empty"),
        ("--temperature=-1", "temperature = -1"),
        ("--implementation=fast", "implementation = 'fast': must be one of"),
        ("--chips=0", "chips = 0: must be at least 1"),
        ("--cache_dtype=fp8", "cache_dtype = 'fp8': must be one of '', 'int8', 'int4'"),
        ("--chips=9", "chips = 9: there are 8 (cpu:0, cpu:1, "),
    ],
)
def test_options_are_checked_before_weights_are_read(run, monkeypatch, flag, message):
    monkeypatch.setattr(generate_lib, "start_loading", lambda *a, **k: pytest.fail("loaded"))
    status, out, err = run("--prompt=a", flag)
    assert (status, out) == (2, "") and err.startswith((f"kvjax: --{message}", f"kvjax: {message}"))


def test_a_quantised_cache(run):
    """A layer has two rows of 16 and two of 2 x 4, a scale for each, and two floats: 1/rms."""
    status, out, err = run("--prompt=The king ", "--cache_dtype=int8")
    assert (status, bool(out)) == (0, True)
    per_token = 2 * (2 * (16 + 4) + 2 * (8 + 4) + 2 * 4)
    assert f"cache {128 * per_token:,} bytes = 1 x 128 tokens x {per_token} in int8" in err


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


def test_loaded_weights_are_freed(run, monkeypatch):
    """During generation one copy of the weights is in memory: arrays of the loaded model are
    freed, or the generator's arrays are views of them.
    """
    arrays, real = [], generate_lib.start_loading

    def load(*args, **options):
        loaded = real(*args, **options)()
        arrays.extend(weakref.ref(x) for x in jax.tree.leaves(nnx.state(loaded.model)))
        return lambda results=[loaded]: results.pop()

    def generate(generator, *args, **options):
        gc.collect()
        starts = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(generator.engine.weights)}
        for array in [array() for array in arrays if array() is not None]:
            first = array.unsafe_buffer_pointer()
            assert any(first <= start < first + array.nbytes for start in starts)
        raise UserError("seen")

    monkeypatch.setattr(generate_lib, "start_loading", load)
    monkeypatch.setattr(generate_lib, "generate", generate)
    assert run("--prompt=a")[2] == "kvjax: seen\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1 is blank"),
        (b"one\n\nthree\n", "line 2 is blank: one prompt per line"),
        (b"\xff\n", "is not UTF-8 text"),
    ],
)
def test_bad_prompt_files(run, tmp_path, content, message):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    status, out, err = run(f"--prompt_file={file}")
    assert (status, out) == (2, "") and message in err and str(file) in err


def test_byte_order_mark(tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    assert generate_lib.read_prompts([], str(tmp_path / "prompts.txt")) == ["one", "two"]
