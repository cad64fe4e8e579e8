"""The keys of a config's section with their meaning, from the dataclass that it becomes."""

import dataclasses
import inspect
import re
import textwrap


@dataclasses.dataclass(frozen=True)
class Key:
    """One key: its default as text ("" where it has none) and what it means."""

    name: str
    default: str
    meaning: str


def keys(cls: type) -> list[Key]:
    """The fields of a config dataclass; meanings are its comments, or its docstring's paragraphs.

    A comment stands behind a field, or in whole lines above it, in the class that has it last.
    """
    sources = [textwrap.dedent(inspect.getsource(c)) for c in cls.__mro__ if c is not object]
    paragraphs = dict(re.findall(r"^(\w+): (.+(?:\n  .+)*)", inspect.getdoc(cls) or "", re.M))
    found = []
    for field in dataclasses.fields(cls):
        pattern = rf"((?:^    # .*\n)*)^    {field.name}: [^#\n]*(?:# (.*))?$"
        matches = (re.search(pattern, source, re.M) for source in sources)
        above, behind = next(filter(None, matches)).groups()
        above = " ".join(line.strip(" #") for line in above.splitlines())
        meaning = behind or above or " ".join(paragraphs.get(field.name, "").split())
        default = "" if field.default is dataclasses.MISSING else repr(field.default)
        found.append(Key(field.name, default, meaning))
    return found
