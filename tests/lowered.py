"""`python -m tests.lowered quick`, or `all`: digests of the programs that this process compiles."""

import hashlib
import json
import math
import sys

import jax

from kvjax import config as config_lib, recipes
from kvjax.decoding import program as decode_program
from kvjax.distributed import sharding
from kvjax.training.program import Program
from tests import runs

MESHES = {
    "data2_fsdp2_sequence2": dict(data=2, fsdp=2, sequence=2),
    "one": dict(fsdp=1),
    "data2_fsdp2_tensor2": dict(data=2, fsdp=2, tensor=2),
    "fsdp2_sequence2_tensor2": dict(fsdp=2, sequence=2, tensor=2),
    "data2_sequence2_tensor2": dict(data=2, fsdp=1, sequence=2, tensor=2),
}
MECHANISMS = {
    "lrkv": recipes.lrkv(4, rank=4, head_dim=16),
    "mla": recipes.mla(4, latent=16, rope_dim=8, head_dim=16),
    "gqa": recipes.gqa(4, kv_heads=2, head_dim=16),
}


def programs(mechanism: str, mesh_name: str) -> dict[str, jax.stages.Lowered]:
    """Lowers a run's programs on a mesh, and its model's decode step on as many chips."""
    config = runs.small_config("embedded", "")
    with config.unlocked():
        config.attention = MECHANISMS[mechanism]
    config.data.vocab_size = 272
    config.optimizer.newton_schulz_steps = 2
    experiment = config_lib.resolve(config)
    compute = experiment.compute.resolve("cpu", config.model.num_layers)
    axes = MESHES[mesh_name]
    devices = jax.devices()[: math.prod(axes.values())]
    program = Program(experiment, compute, sharding.make_mesh(sharding.MeshConfig(**axes), devices))
    chips = decode_program.make_mesh(len(devices), devices)
    options = dict(batch=2, length=256 * len(devices), compute=compute)
    params, token_bytes = program.abstract_state["params"], jax.ShapeDtypeStruct((272,), "int32")
    return {
        "training step": program.lowered_step(),
        "evaluation step": program.eval_step.lower(params, program.abstract_rows, token_bytes),
        "init": program.init.lower(jax.eval_shape(lambda: jax.random.key(0))),
        "decode step": decode_program.lowered_step(experiment.model, chips, **options),
    }


def digests(quick: bool) -> dict[str, str]:
    """Returns digests by mechanism, mesh, program, and with or without source lines."""
    result = {}
    for mechanism in list(MECHANISMS)[: 1 if quick else None]:
        num_meshes = len(MESHES) if mechanism == "lrkv" else 2
        for mesh in list(MESHES)[: 1 if quick else num_meshes]:
            for name, lowered in programs(mechanism, mesh).items():
                for debug in (False, True):
                    text = lowered.as_text(debug_info=debug)
                    key = f"{mechanism}, {mesh}, {name}, {'with' if debug else 'without'} lines"
                    result[key] = hashlib.sha256(text.encode()).hexdigest()
    return result


if __name__ == "__main__":
    print(json.dumps(digests(sys.argv[1] == "quick")))
