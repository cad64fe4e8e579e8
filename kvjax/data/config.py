"""What a data set is made of: sources, split, tokenizer, row length."""

import dataclasses
import shlex

from etils import epath

from kvjax import runtime
from kvjax.errors import DataError

NUM_BYTES = 256
MAX_VOCAB_SIZE = 1 << 24
PREPARED = "prepared:"
# On the command line a key has its own name, but for these.
FLAG_NAMES = {"directory": "output"}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """A data set as asked for; checked when made, before anything is read.

    source: comma-separated; each is `embedded`, a file, folder or glob (.txt, .jsonl, .jsonl.gz,
      .jsonl.xz, .jsonl.zst, .parquet), or `tfds:NAME[/CONFIG][:VERSION][#SPLIT]`. A path has no
      comma; `gs://` works wherever a local path does. Or `prepared:FOLDER`, what `prepare` wrote
      elsewhere, of which only `vocab_size` and `sequence_length` are checked.
    validation_source: the same for validation; then all of `source` is for training. Empty: a part
      of `source` is held out.
    validation_fraction: the share held out of files and TFDS; the embedded corpus always holds out
      200,000 bytes a book.
    text_key: where the text is: JSON key, Parquet column or TFDS feature.
    tokenizer: `bpe` (trained here on the training split), `byte`, or the path of a
      `tokenizer.json`.
    vocab_size: tokens of the trained BPE, specials included; not used by the other tokenizers.
    sequence_length: T; rows hold T + 1 tokens.
    directory: where prepared data lives; empty: $KVJAX_CACHE, or kvjax in the user's cache folder.

    Raises ValueError naming the key, its value and what is allowed.
    """

    source: str = "embedded"
    validation_source: str = ""
    validation_fraction: float = 0.005
    text_key: str = "text"
    tokenizer: str = "bpe"
    vocab_size: int = 2048
    sequence_length: int = 256
    directory: str = ""

    def __post_init__(self):
        if not self.source.strip():
            raise DataError(
                "source='' names nothing: give 'embedded', a file, folder or glob, or 'tfds:NAME'."
            )
        if not 0.0 < self.validation_fraction < 1.0:
            raise DataError(
                f"validation_fraction={self.validation_fraction} must lie between 0 and 1, both"
                " excluded: 0.005 holds out half a percent. To train on all of the source, give a"
                " validation_source."
            )
        if not self.text_key:
            raise DataError(
                "text_key='' must name the JSON key, Parquet column or TFDS feature with the text."
            )
        if self.tokenizer not in ("bpe", "byte") and not self.tokenizer.endswith(".json"):
            raise DataError(
                f"tokenizer={self.tokenizer!r} must be 'bpe', 'byte' or the path of a"
                " tokenizer.json (ending in .json)."
            )
        if self.tokenizer == "bpe" and not NUM_BYTES < self.vocab_size <= MAX_VOCAB_SIZE:
            raise DataError(
                f"vocab_size={self.vocab_size} must be more than {NUM_BYTES} (all bytes, and"
                f" <|bos|>) and at most {MAX_VOCAB_SIZE}; for bytes alone use tokenizer='byte'."
            )
        if self.sequence_length < 1:
            raise DataError(f"sequence_length={self.sequence_length} must be at least 1 token.")

    @property
    def root(self) -> epath.Path:
        """The folder of all prepared data; without `directory`, the user's cache folder."""
        if self.directory:
            return epath.Path(self.directory).expanduser()
        return runtime.cache_directory()

    def command(self) -> str:
        """The command line that prepares this data set."""
        given = [
            shlex.quote(f"--{FLAG_NAMES.get(field.name, field.name)}={getattr(self, field.name)}")
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return " ".join(["python -m kvjax.data.prepare", *given])
