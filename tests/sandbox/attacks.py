"""The programs of attacks.txt, which try to escape, to exhaust the machine, or to pass if wrong.

A row is `name: code`, or `name:` and indented lines of code. Modules that the code names are
imported; @NAME@ stands for a value in `outside.Outside.names`, LOOKED for the errors of a kernel
that has examined the arguments, RIGHT for the right reply to the first call. No program computes
the sum: a breach defines a right `add` only if its attempt works, so that passing means success.
None would harm the machine if it succeeded.
"""

import pathlib
import re
import textwrap

_MODULES = (
    *("atexit", "builtins", "ctypes", "errno", "fcntl", "gc", "json", "mmap", "os", "resource"),
    *("shutil", "signal", "socket", "stat", "subprocess", "sys", "threading", "time"),
)
_NAMED = re.compile(rf"\b({'|'.join(_MODULES)})\.")
# Functions that rows call. System calls have x86-64's numbers; `channel` finds the candidate's.
_FUNCTIONS = {
    "call": """
_library = ctypes.CDLL(None, use_errno=True)
def call(number, *args, wants=()):
    args = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result = _library.syscall(ctypes.c_long(number), *args)
    if result == -1 and ctypes.get_errno() not in wants:
        raise OSError(ctypes.get_errno(), "refused")
    return result
""",
    "run": """
def run(code):
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex(code))
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_long)(start)()
""",
    "channel": """
def channel():
    return next(o for o in gc.get_objects() if type(o).__name__ == "Channel")
""",
}
_WORDS = {
    "LOOKED": "wants=(errno.EFAULT, errno.EINVAL, errno.EBADF, errno.ESRCH, errno.ENOENT)",
    "RIGHT": 'value [\\"int\\", \\"3\\"]',
}


def _program(code: str) -> str:
    for word, meaning in _WORDS.items():
        code = code.replace(word, meaning)
    for name, function in _FUNCTIONS.items():
        if re.search(rf"(?<![.\w]){name}\(", code):
            code = function + code
    named = sorted(set(_NAMED.findall(code)))
    return f"import {', '.join(named)}\n{code}" if named else code


def _breach(code: str) -> str:
    lines = textwrap.indent(code.strip(), "    ")
    right = "    def add(a, b): return a + b\n"
    return f"def add(a, b): return None\ntry:\n{lines}\n{right}except BaseException: pass\n"


def _table(text: str) -> dict[str, str]:
    rows = re.findall(r"^(\S[^:\n]*):(.*(?:\n .*)*)", text, re.MULTILINE)
    return {name: _program(textwrap.dedent(code.lstrip(" ")).strip("\n")) for name, code in rows}


_text = pathlib.Path(__file__).with_suffix(".txt").read_text()
_, *_tables = re.split(r"^#.*\n", _text, flags=re.MULTILINE)
_breaches, FORGERIES, SIEGES = map(_table, _tables)
BREACHES = {name.lstrip("*"): _breach(code) for name, code in _breaches.items()}
# Without layers these work for any user, on any Linux, which shows that the attacks are real.
REAL = [name[1:] for name in _breaches if name.startswith("*")]


def filled(program: str, names: dict[str, object]) -> str:
    """Returns the program with each @NAME@ replaced."""
    for name, value in names.items():
        program = program.replace(f"@{name}@", str(value))
    return program
