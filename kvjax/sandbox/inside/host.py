"""Runs an interpreter in WebAssembly whose standard input and output are this process's."""

import json
import os
import sys

from kvjax.sandbox.inside import limits


def main() -> None:
    """Reads what to run from the command line; limits itself; runs it to its end."""
    asked = json.loads(sys.argv[1])
    sys.path.append(asked["packages"])
    import wasmtime

    engine = wasmtime.Engine()
    module = wasmtime.Module.deserialize_file(engine, asked["compiled"])
    linker, store = wasmtime.Linker(engine), wasmtime.Store(engine)
    linker.define_wasi()
    guest = wasmtime.WasiConfig()
    guest.argv, guest.env = asked["arguments"], [tuple(pair) for pair in asked["environment"]]
    guest.inherit_stdin()
    guest.inherit_stdout()
    store.set_wasi(guest)
    store.set_limits(memory_size=asked["memory_bytes"])
    instance = linker.instantiate(store, module)
    limits.limit(memory_bytes=None, cpu_seconds=asked["cpu_seconds"], processes=None)
    try:
        instance.exports(store)["_start"](store)
    except (wasmtime.Trap, wasmtime.ExitTrap, wasmtime.WasmtimeError):
        os._exit(1)
