"""Keys of a config section and their meanings, from the dataclass behind it."""

import dataclasses
import inspect
import re
import textwrap


@dataclasses.dataclass(frozen=True)
class Key:
    """A config key: its default as text ("" if required) and its meaning."""

    name: str
    default: str
    meaning: str


def keys(cls: type) -> list[Key]:
    """Returns the fields of a config dataclass, with meanings from comments or the docstring.

    A comment follows the field on its line or precedes it on lines of its own.
    """
    sources = [textwrap.dedent(inspect.getsource(c)) for c in cls.__mro__ if c is not object]
    paragraphs = dict(re.findall(r"^(\w+): (.+(?:\n  .+)*)", inspect.getdoc(cls) or "", re.M))
    result = []
    for field in dataclasses.fields(cls):
        pattern = rf"((?:^    # .*\n)*)^    {field.name}: [^#\n]*(?:# (.*))?$"
        matches = (re.search(pattern, source, re.M) for source in sources)
        above, behind = next(filter(None, matches)).groups()
        above = " ".join(line.strip(" #") for line in above.splitlines())
        meaning = behind or above or " ".join(paragraphs.get(field.name, "").split())
        default = "" if field.default is dataclasses.MISSING else repr(field.default)
        result.append(Key(field.name, default, meaning))
    return result
