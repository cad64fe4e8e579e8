"""What a workdir keeps of the model that its run starts from, or that a conversion read.

That model need not be there any more: its context, its chat template, and what Hugging Face's files
say of its tokens are copied.
"""

from collections.abc import Mapping
import json

from etils import epath

from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation import json_text
from kvjax.foundation.configuration import at_least, checked
from kvjax.foundation.errors import UserError, first_line, warn
from kvjax.foundation.files import write_atomically

CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
_CONTEXT = "context.json"
_COPIED = (CHAT_TEMPLATE, TOKENIZER_CONFIG, GENERATION_CONFIG)
FILES = (*_COPIED, _CONTEXT)

TokenFiles = Mapping[str, dict]  # by name, the object of TOKENIZER_CONFIG and GENERATION_CONFIG


def inherit(workdir: epath.Path, parent: epath.Path | None, context: int = 0) -> None:
    """Writes down what a run starts from, instead of what a run before it did that took no step.

    Files that are there and that no run wrote stay as they are.

    Args:
      parent: the workdir of that model; None: from nothing.
      context: tokens that it was trained on.
    """
    _forget(workdir)
    if parent is None:
        return
    texts = {name: text_of(parent / name) for name in _COPIED if (parent / name).exists()}
    new = [name for name in texts if not (workdir / name).exists()]
    # First what is ours: who is killed in between leaves no copy that looks like a user's file.
    write_atomically(workdir / _CONTEXT, json.dumps(dict(context=context, files=new)) + "\n")
    for name, text in texts.items():
        if name in new:
            write_atomically(workdir / name, text)
        elif (workdir / name).read_bytes() != text.encode():
            warn(f"{workdir / name} was left as it is: it is not the one of {parent}")


def is_recorded(workdir: epath.Path) -> bool:
    """Whether it is written down what a run that started from a model started from."""
    return (workdir / _CONTEXT).exists()


def _forget(workdir: epath.Path) -> None:
    """Removes what `inherit` wrote."""
    if not is_recorded(workdir):
        return
    files = _object(workdir / _CONTEXT).get("files")
    files = files if isinstance(files, list) else []
    for name in (*_COPIED, _CONTEXT):
        if (name in files or name == _CONTEXT) and (workdir / name).exists():
            (workdir / name).unlink()


def context(workdir: epath.Path, row: int) -> int:
    """Tokens that a model was trained on: in rows of its run, or before, where they were longer."""
    path = workdir / _CONTEXT
    if not path.exists():
        return row
    before = checked(_object(path).get("context"), int, f"{path}: context")
    at_least(f"{path}: context", before, 1)
    return max(row, before)


def chat_template(folder: epath.Path) -> str | None:
    """Reads the Jinja chat template that the workdir's model was published with; None: without.

    Raises:
      UserError: it is no text.
    """
    path = folder / CHAT_TEMPLATE
    return text_of(path) if path.exists() else None


def token_files(folder: epath.Path) -> dict[str, dict]:
    """Those of a folder that are there.

    Raises:
      UserError: one that is no JSON object.
    """
    paths = [folder / name for name in (TOKENIZER_CONFIG, GENERATION_CONFIG)]
    return {path.name: _object(path) for path in paths if path.exists()}


def token_ids(files: TokenFiles, kind: str, vocab_size: int) -> list[int]:
    """The ids that GENERATION_CONFIG has for "bos", "eos" or "pad"; not those of no token."""
    said = files.get(GENERATION_CONFIG, {}).get(f"{kind}_token_id")
    said = said if isinstance(said, list) else [said]
    return [i for i in said if type(i) is int and 0 <= i < vocab_size]


def ends(files: TokenFiles, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """The ids of the tokens that end a text or a turn."""
    text = files.get(TOKENIZER_CONFIG, {}).get("eos_token")
    named = tokenizer.vocabulary().get(text) if isinstance(text, str) else None
    found = [*token_ids(files, "eos", vocab_size), *([] if named is None else [named])]
    return tuple(sorted(set(found)))


def text_of(path: epath.Path) -> str:
    """What a file of a workdir says; a UserError if it is no text."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}): restore it") from error


def _object(path: epath.Path) -> dict:
    return json_text.read_object(path, "restore it, or remove it")
