"""Renders chat templates in a process with limited memory and time.

Run as a file by `jinja_process`; imports nothing of kvjax. Each line of JSON on standard input is a
request, {template, values, day, seconds}; each line on standard output is its answer: {text}
(without values, the template's literals), {error} for a failed rendering or {broken} for an invalid
template. The process ends without an answer if a limit is exceeded.
"""

import datetime
import functools
import json
import resource
import signal
import sys

import jinja2
from jinja2 import ext, nodes, sandbox


def main() -> None:
    memory, characters = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # CPU time; SIGPROF ends the process.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        answer = _answer(request)
        if len(answer.get("text", "")) > characters:
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _answer(request: dict) -> dict[str, str]:
    try:
        template = _compiled(request["template"])
    except MemoryError:
        raise
    except Exception as error:  # Jinja's, or Python's compiler for too deeply nested blocks
        return dict(broken=str(error) or type(error).__name__)
    if request["values"] is None:
        tokens = template.environment.lexer.tokenize(request["template"])
        return dict(text="\n".join(t.value for t in tokens if t.type in ("data", "string")))
    _Day.now = datetime.datetime.fromisoformat(request["day"]) if request["day"] else None
    try:
        return dict(text=template.render(**request["values"]))
    except MemoryError:
        raise
    except Exception as error:  # a template may do anything to its messages
        return dict(error=str(error) or type(error).__name__)


class _Day:
    """The date that templates read; None: today."""

    now: datetime.datetime | None = None

    @classmethod
    def strftime(cls, form: str) -> str:
        return (cls.now or datetime.datetime.now()).strftime(form)


@functools.lru_cache(maxsize=4)
def _compiled(text: str) -> jinja2.Template:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _Day.strftime
    return environment.from_string(text)


class _Generation(ext.Extension):
    """{% generation %}, which marks text that the assistant is trained on; a plain block here."""

    tags = frozenset({"generation"})

    def parse(self, parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _refuse(message: str):
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own `tojson` without HTML escapes, as in transformers."""
    options = dict(indent=indent, separators=separators, sort_keys=sort_keys)
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


if __name__ == "__main__":
    main()
