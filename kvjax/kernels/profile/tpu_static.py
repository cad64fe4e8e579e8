"""Counts bundles per cached token in a TPU compiler's schedule.

A bundle is the set of instructions that a TensorCore issues in a cycle. A kernel is compiled ahead
of time, in its own process, since libtpu reads its dump flags when it is loaded. Executed bundles
are counted in the schedule after register allocation, including empty bundles, which wait for
results. Waits for DMA and bank conflicts are not counted, because nothing runs.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp

from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from kvjax.hardware import datasheets, topology
from kvjax.kernels.decode_attention import shapes
from kvjax.kernels.decode_attention.api import IMPLEMENTATIONS
from kvjax.kernels.decode_attention.tpu import attention as tpu
from kvjax.kernels.profile.tpu_schedule import CannotFollow, Schedule

LENGTH = 32_768  # tokens of the cache that is compiled for
DTYPE = jnp.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """TensorCores of a chip, sharing its HBM, and the matrix units of each."""

    name: str
    cores: int
    macs: int  # multiply-adds of bfloat16 per cycle and core
    delay: int = 4  # bundles that still run after a taken branch, as schedules show

    @property
    def clock(self) -> float:
        """Cycles/s at which the matrix units reach the datasheet's FLOP/s."""
        return datasheets.get(self.name).bf16_flops / (2 * self.cores * self.macs)

    def hbm_cycles(self, num_bytes: float) -> float:
        """Returns the cycles in which a core's share of HBM's bandwidth moves these bytes."""
        return num_bytes * self.clock * self.cores / datasheets.get(self.name).bandwidth


# cloud.google.com/tpu/docs/system-architecture-tpu-vm: four matrix units per core, 128 x 128 each,
# or 256 x 256 on v6e. (Editions of the v6e page say 2 or 4; 2 would need a clock of 3.5 GHz.)
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(name="v4", cores=2, macs=4 * 128**2, delay=1),
        Chip(name="v5e", cores=1, macs=4 * 128**2),
        Chip(name="v5p", cores=2, macs=4 * 128**2),
        Chip(name="v6e", cores=1, macs=4 * 256**2),
    )
}


class DoesNotCompile(Exception):
    """The compiler refused, or its schedule cannot be followed."""


@dataclasses.dataclass(frozen=True)
class PerToken:
    """Bundles that a chip's cores execute per cached token, and the cycles of each unit alone."""

    bundles: float
    units: dict[str, float]


def per_token(chip: Chip, model: str, mechanism: str, **parameters: int) -> PerToken:
    """Counts the bundles of the TPU kernel with these tile sizes, bfloat16, one sequence.

    Raises:
      NotImplementedError: the kernel does not support the mechanism.
      DoesNotCompile: the compiler refuses it, or its schedule cannot be followed.
      UserError: libtpu is not installed.
    """
    function, arguments = _call(model, mechanism, parameters)
    jax.eval_shape(function, *arguments)  # raises NotImplementedError, before libtpu is loaded
    with tempfile.TemporaryDirectory() as folder:
        arguments = [chip.name, model, mechanism, json.dumps(parameters)]
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = dict(
            JAX_PLATFORMS="cpu",
            JAX_ENABLE_COMPILATION_CACHE="false",  # a program from the cache leaves no schedule
            LIBTPU_INIT_ARGS=" ".join([os.environ.get("LIBTPU_INIT_ARGS", ""), dump]).strip(),
            PYTHONPATH=os.pathsep.join(filter(None, path)),
        )
        run = subprocess.run(
            [sys.executable, "-m", __spec__.name, *arguments],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode == 2:
            raise UserError(run.stderr.strip())
        if run.returncode:
            errors = re.findall(r"^[\w.]*(?:Error|Exception): (.*)", run.stderr, re.MULTILINE)
            sizes = ", ".join(f"{name} {value}" for name, value in parameters.items())
            raise DoesNotCompile(f"{sizes}: {errors[-1] if errors else 'the compiler failed'}")
        return count(read(pathlib.Path(folder)), chip, LENGTH)


def count(kernels: Sequence[Schedule], chip: Chip, length: int) -> PerToken:
    """Returns bundles per token of a sequence's second half, which excludes one-time work.

    Raises:
      DoesNotCompile: a schedule cannot be followed, or does not depend on the sequence length.
    """
    bundles, units = 0, collections.Counter()
    for kernel in kernels:
        run = functools.partial(kernel.executed, delay=chip.delay)
        try:
            executed = [
                sum(run(last, core=core) for core in range(chip.cores))
                for last in (length // 2 - 1, length - 1)
            ]
        except CannotFollow as error:
            raise DoesNotCompile(f"its schedule cannot be followed: {error}") from error
        counts = executed[1] - executed[0]
        bundles += int(counts.sum())
        units.update(kernel.cycles(counts))
    if bundles <= 0:
        raise DoesNotCompile("its schedule does not depend on how long a sequence is")
    tokens = length // 2
    return PerToken(bundles / tokens, {unit: cycles / tokens for unit, cycles in units.items()})


def read(folder: pathlib.Path) -> list[Schedule]:
    """Reads the schedules of the Pallas kernels whose dumps are in a folder."""
    schedules = []
    for analysis in folder.glob("*-schedule-analysis_packed-bundles-post-ra.txt"):
        program = re.sub(r"-\d+-schedule-analysis_.*", "", analysis.name)
        name = re.escape(program.partition("-")[2])  # after a time stamp
        kernel = rf'%{name} = .*custom_call_target="tpu_custom_call"'
        if not re.search(kernel, analysis.read_text()):
            continue
        texts = []
        for suffix in ("packed-bundles-post-ra", "pre-delay_hlo-static-per-bundle-utilization"):
            pattern = re.compile(re.escape(program) + rf"-\d+-{suffix}\.txt")
            (file,) = [f for f in folder.iterdir() if pattern.fullmatch(f.name)]
            texts.append(file.read_text())
        schedules.append(Schedule(*texts))
    if not schedules:
        raise DoesNotCompile("the compiler wrote no schedule of a Pallas kernel")
    return schedules


def _call(model: str, mechanism: str, parameters: Mapping[str, int]):
    """Returns the function to compile and its abstract arguments."""
    implementation = IMPLEMENTATIONS["tpu"]
    unknown = parameters.keys() - inspect.signature(tpu.attend_with_lse).parameters
    if unknown:
        raise NotImplementedError(f"the TPU kernel has no parameter {', '.join(unknown)}")
    shape = shapes.SHAPES[model][mechanism]
    inputs, cache = shapes.abstract(shape, batch=1, length=LENGTH, dtype=DTYPE)
    first_B = jax.ShapeDtypeStruct((1,), jnp.int32)
    function = functools.partial(implementation, **parameters)
    return function, (inputs, cache, first_B)


def _compile(chip: str, model: str, mechanism: str, parameters: str) -> None:
    function, arguments = _call(model, mechanism, json.loads(parameters))
    device = topology.tpu_devices(f"{chip}:{topology.SHAPES[chip][0]}")[0]
    topology.compile_for(device, jax.jit(function), *arguments)


if __name__ == "__main__":
    try:
        _compile(*sys.argv[1:])
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
