"""A small random Whisper as a CTranslate2 file, for tests."""

import math
import struct

import numpy as np

from experiments.conversion import whisper
from kvjax.data import tokenizer as tokenizer_lib

D, N, H, M, V, T = 12, 3, 4, 20, 270, 24  # the decoder
S, F = 10, 5  # the encoder's frames and mel bands
LAYERS = dict(decoder=2, encoder=1)
TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
SPECIALS = ("<|endoftext|>", *whisper.PREFIX)


def _string(text):
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def content(arrays, aliases=(), *, version=6, specification="WhisperSpec", revision=3):
    """Returns the bytes of the model's CTranslate2 file."""
    parts = [struct.pack("<I", version), _string(specification)]
    parts.append(struct.pack("<II", revision, len(arrays)))
    for name, x in arrays.items():
        shape = struct.pack(f"<B{x.ndim}I", x.ndim, *x.shape)
        parts += [_string(name), shape, struct.pack("<BI", TYPES.index(x.dtype.name), x.nbytes)]
        parts.append(x.tobytes())
    parts.append(struct.pack("<I", len(aliases)))
    return b"".join(parts + [_string(name) for alias in aliases for name in alias])


def variables(dtype):
    """Random weights by CTranslate2's names, none of them zero."""
    rng = np.random.default_rng(0)
    found = {}

    def linear(scope, width_in, width_out, *kernel):
        matrix = rng.standard_normal((width_out, width_in, *kernel))
        found[f"{scope}/weight"] = 1.5 * matrix / math.sqrt(width_in)
        found[f"{scope}/bias"] = rng.uniform(0.2, 0.8, width_out)

    def norm(scope):
        found[f"{scope}/gamma"] = rng.uniform(0.5, 1.5, D)
        found[f"{scope}/beta"] = rng.uniform(-0.5, 0.5, D)

    linear("encoder/conv1", F, D, 3)
    linear("encoder/conv2", D, D, 3)
    for part, layers in LAYERS.items():
        for layer in (f"{part}/layer_{i}" for i in range(layers)):
            linear(f"{layer}/self_attention/linear_0", D, 3 * D)
            linear(f"{layer}/self_attention/linear_1", D, D)
            if part == "decoder":
                linear(f"{layer}/attention/linear_0", D, D)
                linear(f"{layer}/attention/linear_1", D, 2 * D)
                linear(f"{layer}/attention/linear_2", D, D)
                norm(f"{layer}/attention/layer_norm")
            linear(f"{layer}/ffn/linear_0", D, M)
            linear(f"{layer}/ffn/linear_1", M, D)
            norm(f"{layer}/self_attention/layer_norm")
            norm(f"{layer}/ffn/layer_norm")
        norm(f"{part}/layer_norm")
        length = T if part == "decoder" else S
        found[f"{part}/position_encodings/encodings"] = rng.standard_normal((length, D))
    found["decoder/embeddings/weight"] = rng.standard_normal((V, D))
    found = {name: x.astype(dtype) for name, x in found.items()}
    return found | {f"{part}/num_heads": np.int16(N) for part in LAYERS}


def write(folder):
    """Writes a folder like the package's, with float16 weights and a byte tokenizer."""
    aliases = [("decoder/projection/weight", "decoder/embeddings/weight")]
    (folder / "model.bin").write_bytes(content(variables(np.float16), aliases))
    tokenizer = tokenizer_lib.train(["some text"], 256 + len(SPECIALS), SPECIALS)
    tokenizer.save(folder / "tokenizer.json")
