"""Runs an interpreter in WebAssembly on this process's standard input and output."""

import json
import os
import sys

from kvjax.sandbox.inside import limits


def main() -> None:
    """Runs the guest of the command line's request, within limits, until it exits."""
    request = json.loads(sys.argv[1])
    sys.path.append(request["packages"])
    import wasmtime

    engine = wasmtime.Engine()
    module = wasmtime.Module.deserialize_file(engine, request["compiled"])
    linker, store = wasmtime.Linker(engine), wasmtime.Store(engine)
    linker.define_wasi()
    guest = wasmtime.WasiConfig()
    guest.argv, guest.env = request["arguments"], [tuple(pair) for pair in request["environment"]]
    guest.inherit_stdin()
    guest.inherit_stdout()
    store.set_wasi(guest)
    store.set_limits(memory_size=request["memory_bytes"])
    instance = linker.instantiate(store, module)
    limits.limit(memory_bytes=None, cpu_seconds=request["cpu_seconds"], processes=None)
    try:
        instance.exports(store)["_start"](store)
    except (wasmtime.Trap, wasmtime.ExitTrap, wasmtime.WasmtimeError):
        os._exit(1)
