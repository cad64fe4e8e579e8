"""Copies a parent's chat template, token files and context into a workdir, and reads them there.

They are copied because the parent, a run or a published model, may be deleted later.
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

TokenFiles = Mapping[str, dict]  # TOKENIZER_CONFIG and GENERATION_CONFIG, parsed


def inherit(workdir: epath.Path, parent: epath.Path | None, context: int = 0) -> None:
    """Copies the parent's files, and removes copies that an earlier run without a step made.

    Keeps files that the user has put there.

    Args:
      parent: workdir of the parent; None: the run starts from random weights.
      context: length in tokens that the parent was trained on.
    """
    _remove_copies(workdir)
    if parent is None:
        return
    texts = {name: text_of(parent / name) for name in _COPIED if (parent / name).exists()}
    new = [name for name in texts if not (workdir / name).exists()]
    # The list of copies is written first, so that after a kill no copy is taken for a user's file.
    write_atomically(workdir / _CONTEXT, json.dumps({"context": context, "files": new}) + "\n")
    for name, text in texts.items():
        if name in new:
            write_atomically(workdir / name, text)
        elif (workdir / name).read_bytes() != text.encode():
            warn(f"{workdir / name} was left as it is: it differs from the file in {parent}")


def _remove_copies(workdir: epath.Path) -> None:
    """Removes the files that `inherit` wrote."""
    if not (workdir / _CONTEXT).exists():
        return
    files = _object(workdir / _CONTEXT).get("files")
    files = files if isinstance(files, list) else []
    for name in (*_COPIED, _CONTEXT):
        if (name in files or name == _CONTEXT) and (workdir / name).exists():
            (workdir / name).unlink()


def context(workdir: epath.Path, row_length: int) -> int:
    """Returns a model's context: the larger of its run's row length and its parent's context."""
    path = workdir / _CONTEXT
    if not path.exists():
        return row_length
    inherited = checked(_object(path).get("context"), int, f"{path}: context")
    at_least(f"{path}: context", inherited, 1)
    return max(row_length, inherited)


def chat_template(folder: epath.Path) -> str | None:
    """Reads the Jinja chat template that the model was published with, if there is one.

    Raises:
      UserError: the file is not UTF-8 text.
    """
    path = folder / CHAT_TEMPLATE
    return text_of(path) if path.exists() else None


def token_files(folder: epath.Path) -> dict[str, dict]:
    """Reads the token files that exist in a folder.

    Raises:
      UserError: a file is no JSON object.
    """
    paths = [folder / name for name in (TOKENIZER_CONFIG, GENERATION_CONFIG)]
    return {path.name: _object(path) for path in paths if path.exists()}


def token_ids(files: TokenFiles, kind: str, vocab_size: int) -> list[int]:
    """Returns the ids of a kind ("bos", "eos", "pad") in GENERATION_CONFIG that are valid ids."""
    ids = files.get(GENERATION_CONFIG, {}).get(f"{kind}_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    return [i for i in ids if type(i) is int and 0 <= i < vocab_size]


def ends(files: TokenFiles, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids of tokens that end a text or a turn, from both token files."""
    text = files.get(TOKENIZER_CONFIG, {}).get("eos_token")
    ids = set(token_ids(files, "eos", vocab_size))
    if isinstance(text, str) and (eos_id := tokenizer.vocabulary().get(text)) is not None:
        ids.add(eos_id)
    return tuple(sorted(ids))


def text_of(path: epath.Path) -> str:
    """Reads a text file; raises a UserError if it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}): restore it") from error


def _object(path: epath.Path) -> dict:
    return json_text.read_object(path, "restore it, or remove it")
