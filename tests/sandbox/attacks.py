"""Programs that try to get out, to take the machine, or to pass without being right.

Each defines `add` wrongly. Those of `BREACHES` put a right one in its place if what they try works,
so that passing means that it worked. Those of `FORGERIES` want to pass without being right, and
those of `SIEGES` want to last, to fill something, or to bring the judge down. @NAME@ stands for
what `outside.Outside` has. None would hurt the machine if it were let through.
"""

import textwrap

# The numbers of system calls are those of x86-64.
_KERNEL = """
import ctypes, errno
_library = ctypes.CDLL(None, use_errno=True)
def call(number, *args, wants=()):
    args = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result = _library.syscall(ctypes.c_long(number), *args)
    if result == -1 and ctypes.get_errno() not in wants:
        raise OSError(ctypes.get_errno(), "refused")
    return result
"""
# Errors that tell that the kernel did look at the arguments.
_LOOKED = "wants=(errno.EFAULT, errno.EINVAL, errno.EBADF, errno.ESRCH, errno.ENOENT)"


def _breach(code: str) -> str:
    lines = textwrap.indent(textwrap.dedent(code).strip(), "    ")
    right = "    def add(a, b): return a + b\n"
    return f"def add(a, b): return None\ntry:\n{lines}\n{right}except BaseException: pass\n"


def _kernel(code: str) -> str:
    return _breach(_KERNEL + textwrap.dedent(code))


_FILES = {
    "write a file": "open('@FOLDER@/new', 'w').write('x')",
    "append to a file": "open('@FOLDER@/victim', 'a').write('x')",
    "truncate a file": "import os; os.truncate('@FOLDER@/victim', 0)",
    "remove a file": "import os; os.unlink('@FOLDER@/removed')",
    "remove a folder": "import shutil; shutil.rmtree('@FOLDER@/within')",
    "rename a file": "import os; os.rename('@FOLDER@/renamed', '@FOLDER@/other')",
    "make a folder": "import os; os.mkdir('@FOLDER@/made')",
    "write through a link": """
        import os
        os.symlink('@FOLDER@/victim', 'link')
        open('link', 'w').write('x')
        """,
    "write through a link elsewhere": """
        import os
        os.symlink('@FOLDER@/victim', '/tmp/kvjax-link-@PORT@')
        """,
    "link a file": "import os; os.link('@FOLDER@/victim', '@FOLDER@/linked')",
    "change the mode of a file": """
        import os
        os.chmod('@FOLDER@/victim', 0o777)
        assert os.stat('@FOLDER@/victim').st_mode & 0o777 == 0o777
        """,
    "change the owner of a file": "import os; os.chown('@FOLDER@/victim', 0, 0)",
    "change the time of a file": "import os; os.utime('@FOLDER@/victim', (0, 0))",
    "set an attribute of a file": "import os; os.setxattr('@FOLDER@/victim', 'user.x', b'x')",
    "make a pipe": "import os; os.mkfifo('@FOLDER@/pipe')",
    "make a device": "import os, stat; os.mknod('@FOLDER@/null', 0o600 | stat.S_IFCHR, 0x103)",
    "fill the disk": "open('filled', 'wb').write(bytes(1 << 22))",
    "make many files": "[open(f'f{i}', 'w').close() for i in range(2000)]",
    "read a secret": "assert open('@FOLDER@/secret').read()",
    "read a secret through /proc": "assert open('/proc/@PARENT@/root@FOLDER@/secret').read()",
    "read the passwords": "assert open('/etc/shadow').read()",
    "read the users": "assert open('/etc/passwd').read()",
    "list a folder": "import os; assert os.listdir('@FOLDER@')",
    "read a device": "open('/dev/zero', 'rb').read(1)",
    "write a device": "open('/dev/null', 'wb').write(b'x')",
    "read the kernel's log": "open('/dev/kmsg', 'rb').read(1)",
    "open how cores are dumped": "open('/proc/sys/kernel/core_pattern', 'r+').close()",
    "open how the kernel asks for modules": "open('/proc/sys/kernel/modprobe', 'r+').close()",
    "open its own memory": "open('/proc/self/mem', 'r+b').close()",
    "list its descriptors": "import os; assert os.listdir('/proc/self/fd')",
    "open its descriptors again": "open('/proc/self/fd/1', 'wb', 0).close()",
    "find inherited descriptors": """
        import os, sys
        found = []
        for i in range(3, 4096):
            try:
                os.fstat(i)
                found.append(i)
            except OSError:
                pass
        assert found and sys.platform != "wasi"  # where 3 is the standard library's own folder
        """,
    "watch a folder": """
        import ctypes
        library = ctypes.CDLL(None)
        assert library.inotify_add_watch(library.inotify_init1(0), b'@FOLDER@', 0xfff) > 0
        """,
    "make shared memory": """
        from multiprocessing import shared_memory
        shared_memory.SharedMemory(create=True, size=16).unlink()
        """,
}

_NETWORK = {
    "connect": "import socket; socket.create_connection(('127.0.0.1', @PORT@), 1)",
    "send a datagram": """
        import socket
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @UDP@))
        """,
    "connect by a path": "import socket; socket.socket(socket.AF_UNIX).connect('@FOLDER@/socket')",
    "connect by an abstract name": """
        import socket
        socket.socket(socket.AF_UNIX).connect('\\0kvjax-@PORT@')
        """,
    "listen": "import socket; socket.create_server(('127.0.0.1', 0))",
    "talk to the kernel's network": """
        import socket
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        """,
    "see packets": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x300)",
    "pass descriptors": """
        import os, socket
        one, other = socket.socketpair()
        socket.send_fds(one, [b'x'], [0, 1])
        assert socket.recv_fds(other, 1, 2)[1]
        """,
}

_PROCESSES = {
    "fork": """
        import os
        for _ in range(30):
            if os.fork() == 0:
                os._exit(0)
        """,
    "start threads": """
        import threading, time
        for _ in range(30):
            threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
        """,
    "start a program": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "start a shell": "import os; assert os.system('true') == 0",
    "spawn": "import os; assert os.posix_spawn('/bin/true', ['true'], {})",
    "become a program": """
        import os, sys
        loop = 'while read number rest; do echo $number value null; done'
        os.execv('/bin/sh', ['sh', '-c', loop])
        """,
    "signal its parent": "import os, signal; os.kill(os.getppid(), signal.SIGURG)",
    "signal the process that judges": "import os, signal; os.kill(@PARENT@, signal.SIGURG)",
    "signal everything": "import os; os.kill(-1, 0)",
    "signal its group": "import os; os.killpg(0, 0)",
    "signal the judge": "import os; os.kill(os.getpid() + 1, 0)",
    "stop itself": "import os, signal; os.kill(os.getpid(), signal.SIGCONT)",
    "have its pipe signal the process that judges": """
        import fcntl, signal
        fcntl.fcntl(0, fcntl.F_SETOWN, @PARENT@)
        fcntl.fcntl(0, 10, signal.SIGURG)
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | fcntl.FASYNC)
        """,
    "type on the terminal": "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",
    "enlarge its pipe": "import fcntl; fcntl.fcntl(1, 1031, 1 << 20)",
    "read its own environment in /proc": "assert open('/proc/self/environ').read()",
    "find a secret in its environment": """
        import os
        assert any('SECRET' in name for name in os.environ)
        """,
    "read the environment of the process that judges": """
        assert open('/proc/@PARENT@/environ').read()
        """,
    "open the memory of the process that judges": "open('/proc/@PARENT@/mem', 'rb').close()",
    "read the maps of the process that judges": "assert open('/proc/@PARENT@/maps').read()",
    "open a descriptor of the process that judges": "open('/proc/@PARENT@/fd/0', 'rb').close()",
    "list processes": "import os; assert [n for n in os.listdir('/proc') if n.isdigit()]",
    "become root": "import os; os.setuid(0)",
    "become another user": "import os; os.setresuid(1, 1, 1)",
    "leave its session": "import os; os.setsid()",
    "change its root": "import os; os.chroot('/')",
    "choose its cores": "import os; os.sched_setaffinity(0, os.sched_getaffinity(0))",
    "choose the cores of the process that judges": """
        import os
        os.sched_setaffinity(@PARENT@, os.sched_getaffinity(0))
        """,
    "be preferred": "import os; os.setpriority(os.PRIO_PROCESS, 0, 1)",
    "raise its limits": """
        import resource
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        """,
    "set limits of the process that judges": """
        import resource
        now = resource.prlimit(@PARENT@, resource.RLIMIT_NOFILE)
        resource.prlimit(@PARENT@, resource.RLIMIT_NOFILE, now)
        """,
    "be told the limits of the process that judges": """
        import resource
        resource.prlimit(@PARENT@, resource.RLIMIT_NOFILE)
        """,
    "map page zero": """
        import ctypes
        library = ctypes.CDLL(None, use_errno=True)
        library.mmap.restype = ctypes.c_long
        assert library.mmap(*map(ctypes.c_long, (0, 4096, 3, 0x32, -1, 0))) == 0
        """,
    "take 1 TB": "bytearray(1 << 40)",
    "take 1 GB": "bytearray(1 << 30)",
}

_CALLS = {
    "unshare": "call(272, 0x10000000)",
    "mount": f"call(165, 0, 0, 0, 0, 0, {_LOOKED})",
    "enter a namespace": f"call(308, 0, 0, {_LOOKED})",
    "clone with new namespaces": "call(56, 0x10000000 | 0x4000, 0, 0, 0, 0) or call(231, 0)",
    "clone3": f"call(435, 0, 0, {_LOOKED})",
    "trace": f"call(101, 16, @PARENT@, 0, 0, {_LOOKED})",
    "read another process's memory": f"call(310, @PARENT@, 0, 0, 0, 0, 0, {_LOOKED})",
    "write another process's memory": f"call(311, @PARENT@, 0, 0, 0, 0, 0, {_LOOKED})",
    "open a process": "call(434, @PARENT@, 0)",
    "take a process's descriptor": "call(438, call(434, @PARENT@, 0), 0, 0)",
    "io_uring": f"call(425, 1, 0, {_LOOKED})",
    "userfaultfd": "call(323, 1)",
    "a file in memory": "call(319, b'x', 0)",
    "run a file in memory": f"call(322, 1, b'', 0, 0, 0x1000, {_LOOKED})",
    "bpf": f"call(321, 0, 0, 0, {_LOOKED})",
    "a keyring": "call(250, 0, -3, 1)",
    "performance events": f"call(298, 0, 0, -1, -1, 0, {_LOOKED})",
    "another filter": f"call(317, 1, 0, 0, {_LOOKED})",
    "dumpable again": "call(157, 4, 1, 0, 0, 0)",
    "outlive its parent": "call(157, 1, 0, 0, 0, 0)",
    "open by a handle": f"call(304, 0, 0, 0, {_LOOKED})",
    "open for writing by number": "call(257, -100, b'@FOLDER@/victim', 1, 0)",
    "create by number": "call(2, b'@FOLDER@/new', 0o101, 0o600)",
    "creat by number": "call(85, b'@FOLDER@/new', 0o600)",
    "openat2": f"call(437, -100, b'@FOLDER@/secret', 0, 0, {_LOOKED})",
    "a nameless file": "call(257, -100, b'@FOLDER@', 0o20200002, 0o600)",
    "System V shared memory": "call(31, call(29, 0, 4096, 0o1600), 0, 0)",
    "a System V queue": "call(71, call(68, 0, 0o1600), 0, 0)",
    "a message queue": "call(240, b'kvjax-@PORT@', 0o102, 0o600, 0)",
    "fanotify": f"call(300, 0, 0, {_LOOKED})",
    "the host's name": "call(170, b'@HOST@', len('@HOST@'))",
    "compare processes": f"call(312, @PARENT@, @PARENT@, 0, 0, 0, {_LOOKED})",
    "a signal with a value": f"call(129, @PARENT@, 23, 0, {_LOOKED})",
    "a timer": f"call(222, 0, 0, 0, {_LOOKED})",
    "splice": f"call(275, 0, 0, 1, 0, 0, 0, {_LOOKED})",
    "an old set of numbers": "call(0x40000000 + 39)",
}

_MACHINE_CODE = """
import ctypes, mmap
def run(code):
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex(code))
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_long)(start)()
"""
_CODES = {
    "a call in machine code": "assert run('b8390000000f05c3') > 0",  # fork
    "a call through int 0x80": "assert run('b814000000cd80c3') > 0",  # getpid of i386
}

BREACHES = {
    **{name: _breach(code) for name, code in (_FILES | _NETWORK | _PROCESSES).items()},
    **{name: _kernel(code) for name, code in _CALLS.items()},
    **{name: _breach(f"{_MACHINE_CODE}{code}") for name, code in _CODES.items()},
}

# In a call, the channel through which the candidate replies.
_CHANNEL = """
import gc, os, sys
def channel():
    return next(o for o in gc.get_objects() if type(o).__name__ == "Channel")
"""
_RIGHT_REPLY = 'value [\\"int\\", \\"3\\"]'

FORGERIES = {
    "leave": "import sys; sys.exit(0)",
    "leave at once": "import os; os._exit(0)",
    "leave in the call": "def add(a, b): import sys; sys.exit(0)",
    "leave in the call at once": "def add(a, b): import os; os._exit(0)",
    "equal to everything": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return hash(3)
def add(a, b): return Equal()
""",
    "a number equal to everything": """
class Equal(int):
    def __eq__(self, other): return True
    def __hash__(self): return hash(3)
def add(a, b): return Equal(0)
""",
    "a text equal to everything": """
class Equal(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def add(a, b): return Equal("3")
""",
    "an instance of everything": """
class Any(type):
    def __instancecheck__(cls, instance): return True
    def __subclasscheck__(cls, other): return True
    def __eq__(cls, other): return True
    __hash__ = type.__hash__
class Value(metaclass=Any):
    __class__ = int
    def __subclasshook__(cls, other): return True
    def __eq__(self, other): return True
    def __index__(self): return 3
def add(a, b): return Value
def _(): return Value()
""",
    "looks like a number": """
class Value:
    __class__ = int
    def __eq__(self, other): return True
    def __index__(self): return 3
    def __format__(self, how): return "3"
def add(a, b): return Value()
""",
    "patches builtins": """
import builtins
builtins.AssertionError = type("Quiet", (Exception,), {})
builtins.isinstance = lambda *args: True
builtins.int = float = lambda *args: 3
def add(a, b): return None
""",
    "patches json": """
import json
json.dumps = lambda *args, **keywords: '["int", "3"]'
json.loads = lambda *args: None
def add(a, b): return None
""",
    "redefines check in all frames": """
import sys, gc
def add(a, b):
    frame = sys._getframe()
    while frame:
        frame.f_globals["check"] = frame.f_globals["add"] = lambda *args: None
        frame = frame.f_back
    for found in gc.get_objects():
        if isinstance(found, dict) and "check" in found: found["check"] = lambda *args: None
""",
    "writes passed everywhere": """
import os
def add(a, b):
    for i in range(32):
        try: os.write(i, b"\\npassed \\"\\"\\n")
        except OSError: pass
""",
    "replies in advance": _CHANNEL
    + f"""
for _ in range(3): os.write(1, b"0 {_RIGHT_REPLY}\\n")
def add(a, b): return None
""",
    "replies in advance of the next call": _CHANNEL
    + f"""
def add(a, b):
    if a == 1:
        channel().reply("{_RIGHT_REPLY}")
        channel().reply("{_RIGHT_REPLY}".replace("3", "5"))
    while True: pass
""",
    "replies twice": _CHANNEL
    + f"""
def add(a, b):
    if a == 1:
        channel().reply("{_RIGHT_REPLY}\\n" + channel()._number.decode() + " {_RIGHT_REPLY}")
    return 5
""",
    "replies to an older request": _CHANNEL
    + """
old = channel()._number
def add(a, b):
    channel()._number = old
    return a + b
""",
    "replies as the judge": _CHANNEL
    + """
def add(a, b): channel().reply('passed ""')
""",
    "replies with a call": _CHANNEL
    + """
def add(a, b): channel().reply('call ["check", [], {}]')
""",
    "looks for the test": """
import gc
def add(a, b):
    for found in gc.get_objects():
        if isinstance(found, dict):
            for value in list(found.values()):
                if isinstance(value, str) and "assert candidate(" in value and "==" in value:
                    if "gc.get_objects" not in value:
                        return eval(value.partition("==")[2].split()[0])
""",
    "reads the expected value from its caller": """
import sys
def add(a, b):
    frame = sys._getframe(1)
    while frame:
        if "check" in frame.f_code.co_name:
            numbers = [c for c in frame.f_code.co_consts if isinstance(c, int)]
            return numbers[-1]
        frame = frame.f_back
""",
    "an exception named as a verdict": """
def add(a, b): raise type('passed ""\\n0 passed', (Exception,), {})
""",
    "an exception that ends programs": "def add(a, b): raise GeneratorExit",
    "an exception with a hostile name": """
class Named(Exception): pass
Named.__name__ = "SystemExit"
def add(a, b): raise Named
""",
    "not a number": "def add(a, b): return float('nan')",
    "keys that are not numbers": "def add(a, b): return {float('nan'): 3, float('nan'): 5}",
    "a set of what is not a number": "def add(a, b): return {float('nan'), float('nan')}",
    "an unhashable key": _CHANNEL
    + """
def add(a, b): channel().reply('value ["dict", ["list"], null]')
""",
    "a reply that is no value": _CHANNEL
    + """
def add(a, b): channel().reply('value [["int", "3"]]')
""",
    "a reply that is no JSON": _CHANNEL + "def add(a, b): channel().reply('value {')",
    "a reply of a raw number": _CHANNEL + "def add(a, b): channel().reply('value 3')",
    "a reply that is not ASCII": """
import os
def add(a, b): os.write(1, "é".encode() * 10 + b"\\n")
""",
    "a surrogate": "def add(a, b): return '\\ud800'",
    "an answer of 10^5 digits": "def add(a, b): return 10 ** 100000",
    "after the verdict": """
import atexit, os
atexit.register(lambda: os.write(1, b'passed ""\\n'))
def add(a, b): return None
""",
    "traces": """
import sys
sys.settrace(lambda *args: None)
sys.setprofile(lambda *args: None)
sys.addaudithook(lambda *args: None)
def add(a, b): return None
""",
    "an answer that lies about itself": """
class Values(list):
    def __iter__(self): return iter([3])
    def __len__(self): return 1
    def __eq__(self, other): return True
def add(a, b): return Values()
""",
}

SIEGES = {
    "loops": "while True: pass",
    "loops in the call": "def add(a, b):\n    while True: pass",
    "sleeps": "import time; time.sleep(1000)",
    "ignores signals and loops": """
import signal
for i in range(1, 65):
    try: signal.signal(i, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "computes for ever": "9 ** 9 ** 9 ** 9",
    "grows": "a = []\nwhile True: a.append(bytes(1 << 20))",
    "calls itself": """
import sys
sys.setrecursionlimit(10 ** 9)
def f(): return f()
f()
""",
    "a huge answer": "def add(a, b): return 'x' * (100 << 20)",
    "an answer over the limit": "def add(a, b): return 'x' * (2 << 20)",
    "an answer nested deep": """
def add(a, b):
    value = []
    for _ in range(10 ** 5): value = [value]
    return value
""",
    "a reply nested deep": _CHANNEL
    + """
def add(a, b): channel().reply("value " + "[" * 10 ** 5 + "]" * 10 ** 5)
""",
    "an answer that contains itself": """
def add(a, b):
    value = []
    value.append(value)
    return value
""",
    "an answer of shared parts": """
def add(a, b):
    value = []
    for _ in range(100): value = [value, value]
    return value
""",
    "keys with one hash": """
def add(a, b): return {i * (2 ** 61 - 1): None for i in range(40000)}
""",
    "a flood": """
import os
def add(a, b):
    while True: os.write(1, bytes(1 << 16))
""",
    "a flood of lines": "import os\nwhile True: os.write(1, b'\\n' * 1000)",
    "prints without end": "while True: print('x' * 1000)",
    "a line that never ends": """
import os
def add(a, b):
    while True: os.write(1, b'x')
""",
    "closes its descriptors": "import os\nfor i in range(3): os.close(i)\nwhile True: pass",
    "reads the requests": "import os\nwhile True: os.read(0, 100)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "aborts": "import os; os.abort()",
    "waits for what is typed": "input()",
    "runs while it is imported": "import threading\nthreading.Event().wait()",
}


def filled(program: str, names: dict[str, object]) -> str:
    """The program with each @NAME@ replaced."""
    for name, value in names.items():
        program = program.replace(f"@{name}@", str(value))
    return program
