"""The config of a data set: sources, split, tokenizer, row length."""

from collections.abc import Mapping
import dataclasses
import re
import shlex
from typing import Any

from etils import epath

from kvjax.foundation import runtime
from kvjax.foundation.configuration import between, one_of
from kvjax.foundation.errors import DataError
from kvjax.published import hub

NUM_BYTES = 256
MAX_VOCAB_SIZE = 1 << 24
MAX_SEQUENCE_LENGTH = 1 << 24
PREPARE_HOURS = 1.0  # default of the hours that a run may spend on preparing its data
PREPARED = "prepared:"
MIXTURE = "mixture"  # the source of a run on conversations, see kvjax.conversation
PARENT = "parent"  # the tokenizer of the model that such a run starts from
SPECIALS = {"bos": 1, "chat": 9}  # number of special tokens by kind
# Options of `prepare` whose names differ from their keys.
FLAG_NAMES = {"directory": "output"}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Sources, tokenizer and row length of a data set; checked before any file is read.

    source: one or more of the following, separated by commas. `embedded`: the embedded corpus.
      `embedded:lookups`: synthetic documents in which facts are stated twice, see `lookups`. A
      file, folder or glob (.txt, .parquet, and JSON lines: .jsonl, .ndjson, .json, also compressed
      as .gz, .bz2, .xz, .zst), local or in a bucket (`gs://`). A path must not contain a comma; one
      that exists is never read as a glob; hidden files and .json files of a folder are skipped.
      `hf://datasets/OWNER/NAME[@REVISION]/PATH`: a file, folder or glob of a hub's data set, which
      is downloaded into Hugging Face's cache. `tfds:NAME[/CONFIG][:VERSION][#SPLIT]`: a data set of
      TFDS in $TFDS_DATA_DIR (empty: ~/tensorflow_datasets).
      Instead of these, `prepared:FOLDER`: data that `prepare` wrote elsewhere, of which only
      `vocab_size` and `sequence_length` are checked; or `mixture`: conversations, see
      config.mixture.
    validation_source: sources of the validation text, like `source`, which is then used for
      training only. Empty: a part of `source` is held out.
    validation_fraction: the share held out of files and TFDS; the embedded corpus always holds out
      200,000 bytes per book.
    text_key: JSON key, Parquet column or TFDS feature of the text. Records whose text is null are
      skipped and counted.
    tokenizer: `bpe` (trained here on the training split), `byte`, or the path of a
      `tokenizer.json`. For conversations also `parent`, the tokenizer of config.train.parent.
    vocab_size: tokens of the trained BPE, including special tokens. Preparation ignores it for
      other tokenizers, but a run must give their size here.
    sequence_length: T; rows hold T + 1 tokens.
    specials: special tokens of the tokenizer. `bos`: those of a loaded tokenizer, or `<|bos|>` of
      one trained here. `chat`: also the special tokens of conversations, nine in all.
    directory: folder of all prepared data; empty: $KVJAX_CACHE, or kvjax in the user's cache
      folder.

    Raises UserError with the key, its value and the allowed values.
    """

    source: str = "embedded"
    validation_source: str = ""
    validation_fraction: float = 0.005
    text_key: str = "text"
    tokenizer: str = "bpe"
    vocab_size: int = 2048
    sequence_length: int = 256
    specials: str = "bos"
    directory: str = ""

    def __post_init__(self):
        for key in ("source", "validation_source"):
            value = getattr(self, key)
            items = split_source(value)
            if not items and (value or key == "source"):
                raise DataError(
                    f"config.data.{key} = {value!r}: names no source; give 'embedded', a file, "
                    "folder or glob, 'tfds:NAME' or 'hf://datasets/OWNER/NAME/PATH'"
                )
            for item in items:
                if hub.is_name(item):
                    hub.parse(f"config.data.{key}", item, kind="dataset")
                elif item != "embedded" and not item.startswith("tfds:"):
                    runtime.path(f"config.data.{key}", item.removeprefix(PREPARED))
        if not 0.0 < self.validation_fraction < 1.0:
            raise DataError(
                f"config.data.validation_fraction = {self.validation_fraction}: must lie between 0 "
                "and 1, both excluded: 0.005 holds out 0.5 %. To train on all of the source, give "
                "a validation_source"
            )
        if self.tokenizer.endswith(".json"):
            runtime.path("config.data.tokenizer", self.tokenizer)
        elif self.tokenizer == PARENT:
            if self.source != MIXTURE and not is_prepared(self.source):
                raise DataError(
                    f"config.data.tokenizer = {PARENT!r}: is only for conversations (source="
                    f"{MIXTURE!r}); give 'bpe', 'byte' or the path of a tokenizer.json"
                )
        elif self.tokenizer not in ("bpe", "byte"):
            raise DataError(
                f"config.data.tokenizer = {self.tokenizer!r}: must be 'bpe', 'byte' or the path of "
                "a tokenizer.json (ending in .json)"
            )
        one_of("config.data.specials", self.specials, tuple(SPECIALS))
        between("config.data.vocab_size", self.vocab_size, 1, MAX_VOCAB_SIZE)
        minimum = NUM_BYTES + SPECIALS[self.specials]
        if self.tokenizer == "bpe" and self.vocab_size < minimum:
            raise DataError(
                f"config.data.vocab_size = {self.vocab_size}: must be at least {minimum} (all "
                f"{NUM_BYTES} bytes, and special tokens); for a byte vocabulary, tokenizer='byte'"
            )
        between("config.data.sequence_length", self.sequence_length, 1, MAX_SEQUENCE_LENGTH)
        if self.directory:
            runtime.path("config.data.directory", self.directory)

    @property
    def root(self) -> epath.Path:
        """The folder of all prepared data; raises a UserError if a file has its name."""
        if self.directory:
            return runtime.folder("config.data.directory", self.directory)
        return runtime.cache_directory()

    def command(self) -> str:
        """Returns the command line that prepares this data set."""
        return command(dataclasses.asdict(self))


def command(values: Mapping[str, Any]) -> str:
    """Returns the command line that prepares a data set with these keys; does not check them."""
    if values.get("source") == MIXTURE:
        return "python -m kvjax.main --config=..."  # the run prepares its conversations
    fields = {field.name: field for field in dataclasses.fields(DataConfig)}
    options = [
        shlex.quote(f"--{FLAG_NAMES.get(name, name)}={value}")
        for name, value in values.items()
        if name not in fields or value != fields[name].default
    ]
    return " ".join(["python -m kvjax.data.prepare", *options])


def as_options(message: str) -> str:
    """Returns a message with config keys replaced by the options of `prepare`."""

    def option(match: re.Match) -> str:
        return f"--{FLAG_NAMES.get(match[1], match[1])}"

    return re.sub(r"config\.data\.(\w+)", option, message)


def split_source(spec: str) -> list[str]:
    """Splits the comma-separated items of a `source`."""
    return [item.strip() for item in spec.split(",") if item.strip()]


def is_prepared(source: str) -> bool:
    """Returns True if a source is a folder of prepared rows."""
    return str(source).startswith(PREPARED)
