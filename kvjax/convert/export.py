"""Exports a workdir as safetensors: for transformers, or with the small cache kept.

    python -m kvjax.convert.export --workdir=runs/lrkv --out=~/models/lrkv --format=huggingface
    python -m kvjax.convert.export --workdir=runs/lrkv --out=~/models/small --format=factored
    python -m kvjax.convert.export --workdir=runs/mla --out=~/models/mla --format=deepseek

huggingface writes a model that transformers loads: GPT-2, Llama, Mistral, Gemma 2 or 3, Granite,
OLMo 2 or 3, Qwen 2 or 3, SmolLM3, or NanoChat for models of this repository's recipe. Factors are
multiplied out, so the cache is that of MHA, GQA or MQA. factored keeps the factors: `python -m
kvjax.convert --source=OUT` reads the folder, and its README.md describes it for other programs.
auto is huggingface if transformers has the model and its cache does not grow, else factored.
deepseek writes models whose attention is mathematically MLA, without QK-norm: vLLM, SGLang and
transformers load them as DeepSeek-V3 and cache C + P numbers per token and layer.
"""

import argparse
import json
import shlex

from etils import epath
import jax.numpy as jnp
import numpy as np

from kvjax.convert import (
    deepseek,
    digests,
    factored_format,
    factored_readme,
    huggingface,
    into_folder,
    into_workdir,
    model as model_lib,
)
from kvjax.convert.into_folder import ExportPlan, LazyTensor
from kvjax.convert.model import LazyModel
from kvjax.costs import formulas
from kvjax.data import manifest
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.model.config import TransformerConfig
from kvjax.workdir import origin

FORMATS = ("auto", "huggingface", "factored", "deepseek")
DTYPES = {huggingface.DTYPES[name]: name for name in ("F32", "BF16")}  # to safetensors' names
_CACHE_DTYPE = jnp.dtype(jnp.bfloat16)  # for reported sizes


def _parser() -> command_line.Parser:
    parser = command_line.Parser(__doc__)
    parser.add_output()
    add = parser.add_argument
    add("--workdir", default="", help="workdir of a run or of python -m kvjax.convert")
    add("--out", default="", help="folder to write; must not exist")
    add("--format", default="auto", help=f"{', '.join(FORMATS)} (auto)")
    text = f"program that reads --format=deepseek: {', '.join(deepseek.ENGINES)}; vllm pads latents"
    text += " and RoPE keys to sizes that the GPU kernels of vLLM and SGLang support (vllm)"
    add("--engine", default="", help=text)
    add("--dtype", default="", help=f"dtype of weights: {', '.join(DTYPES)} (the workdir's)")
    return parser


def main(arguments: list[str]) -> None:
    """Exports a model; see the module's docstring."""
    options = _parser().parse(arguments)
    with command_line.naming_options(options):
        _run(options, Output(options))


def _run(options: argparse.Namespace, out: Output) -> None:
    command_line.require(options, workdir="the workdir of a model", out="a new folder")
    one_of("format", options.format, FORMATS)
    if options.dtype:
        one_of("dtype", options.dtype, DTYPES)
    if options.engine:
        one_of("engine", options.engine, deepseek.ENGINES)
        if options.format != "deepseek":
            raise UserError(f"--engine = {options.engine!r}: needs --format=deepseek")
    target = into_workdir.check(options.out)
    runtime.start()
    model = model_lib.TrainedModel(runtime.workdir(options.workdir))
    dtype = DTYPES.get(options.dtype) or into_folder.dtype_name(model.parameters())
    if options.format == "deepseek":
        kind, why = options.format, ""
        plan = deepseek.plan(model, dtype, options.engine or deepseek.ENGINES[0])
    else:
        kind, plan, why = _plan(options.format, model, dtype)
    into_folder.write(plan, target, dtype)
    _report(out, target, model, plan, kind=kind, dtype=dtype, why=why)


def _plan(kind: str, model: LazyModel, dtype: str) -> tuple[str, ExportPlan, str]:
    """Returns the format, the contents of the folder, and the reason if auto chose factored."""
    if kind == "factored":
        return kind, factored(model), ""
    try:
        plan = huggingface.plan(model, dtype)
    except UserError as error:
        if kind == "huggingface":
            raise UserError(f"{error}. --format=factored supports more models") from error
        return "factored", factored(model), f"transformers has no such model: {error}"
    if kind == "auto" and _cache_bytes(plan.transformer) > _cache_bytes(model.transformer):
        why = "keeps the small cache, which --format=huggingface would multiply out"
        return "factored", factored(model), why
    return "huggingface", plan, ""


def factored(model: LazyModel) -> ExportPlan:
    """Returns the export of a model in the factored format."""
    config = model.transformer

    def tensor(path, layer, shape):
        return LazyTensor(tuple(shape), lambda: np.asarray(model.read(path, layer)))

    shapes = {path: shape for path, (shape, _) in model.parameters().items()}
    order = [(path, None) for path in shapes if path[0] != "segments"]
    for segment, (_, length) in enumerate(config.layer_groups):
        own = [path for path in shapes if path[:2] == ("segments", segment)]
        order += [(path, layer) for layer in range(length) for path in own]
    tensors = {
        factored_format.name_of(config, path, layer): tensor(
            path, layer, shapes[path] if layer is None else shapes[path][1:]
        )
        for path, layer in order
    }
    attention = model_lib.attention_section(config)
    files = {
        "config.json": factored_format.config_json(config, attention, context=model.context),
        manifest.TOKENIZER: model.tokenizer_json,
    }
    if model.chat_template is not None:
        files[origin.CHAT_TEMPLATE] = model.chat_template
    for file, content in model.token_files.items():
        files[file] = json.dumps(content, indent=2) + "\n"
    files[digests.FILE] = digests.of_files(files)
    files["README.md"] = factored_readme.text(model.name, config, context=model.context)
    return ExportPlan("kvjax's factors", config, tensors, files)


def _cache_bytes(config: TransformerConfig) -> int:
    """Returns the cache bytes per token over all layers."""
    return formulas.cache_bytes_per_token(config, _CACHE_DTYPE)


def _report(
    out: Output,
    target: epath.Path,
    model: LazyModel,
    plan: ExportPlan,
    *,
    kind: str,
    dtype: str,
    why: str,
) -> None:
    """Prints the files written, and the cache sizes before and after."""
    before, after = _cache_bytes(model.transformer), _cache_bytes(plan.transformer)
    total, precision = into_folder.size(plan, dtype), huggingface.DTYPES[dtype]
    if why:
        out.say(f"--format=factored: {why}\n")
    written = f"{len(plan.tensors)} tensors, {progress.size(total)} in {precision}"
    out.say(f"{model.name} written to {target}: {plan.title}, {written}")
    out.say(f"\ncache: {before:,} bytes per token in bfloat16 in kvjax")
    if kind == "huggingface" and after > before:
        out.say(
            f"and {after:,} in bfloat16 in transformers ({after / before:.1f} x), which multiplies "
            "the factors out. --format=factored keeps the small cache"
        )
    for note in plan.notes:
        out.say(note)
    folder, source = json.dumps(str(target)), shlex.quote(str(target))
    if kind == "factored":
        out.say(f"\npython -m kvjax.convert --source={source} --out=runs/NAME", wrap=False)
    else:
        out.say(f"\ntransformers.AutoModelForCausalLM.from_pretrained({folder})", wrap=False)
    if kind == "deepseek" and not any(name.endswith(".bias") for name in plan.tensors):
        out.say(f"vllm serve {source}", wrap=False)
    out.result(
        dict(
            out=str(target),
            format=kind,
            model=plan.title,
            dtype=precision,
            tensors=len(plan.tensors),
            bytes=total,
            cache_bytes_per_token=dict(workdir=before, out=after),
        )
    )


if __name__ == "__main__":
    command_line.run(main)
