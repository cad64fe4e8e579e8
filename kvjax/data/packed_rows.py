"""The TFDS data set of packed rows: raw bytes in ArrayRecord, in the order of the stream."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import functools

from etils import epath
import numpy as np
import tensorflow_datasets as tfds

# TFDS keeps a shard's examples in memory while it writes it.
SHARD_BYTES = 64 << 20
_TOLD_ROWS = 1024


class PackedRows(tfds.core.ShardBasedBuilder, skip_registration=True):
    """Rows of T + 1 tokens, uint16 or uint32; each starts with the last token of the row before it.

    A GeneratorBasedBuilder would hold all rows in memory, and write more than 1 GB through
    TensorFlow.
    """

    VERSION = tfds.core.Version("1.0.0")

    def __init__(
        self,
        streams: Mapping[str, np.ndarray],
        sequence_length: int,
        data_dir: epath.PathLike,
        wrote: Callable[[int], None] = lambda rows: None,
    ):
        """Made ready to write `streams` as rows of `sequence_length` + 1 tokens under `data_dir`.

        Args:
          streams: the tokens of each split, unsigned [n·T + 1]; may be memory-mapped.
          sequence_length: T.
          data_dir: a folder of its own.
          wrote: told now and then how many rows of all splits are written.
        """
        self._wrote, self._written = wrote, 0
        self._streams = streams
        self._sequence_length = sequence_length
        super().__init__(data_dir=data_dir, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        (dtype,) = {stream.dtype for stream in self._streams.values()}
        tokens = tfds.features.Tensor(
            shape=(self._sequence_length + 1,), dtype=np.dtype(dtype).type, encoding="bytes"
        )
        return tfds.core.DatasetInfo(
            builder=self,
            description="Rows of tokens; consecutive rows overlap by one token.",
            features=tfds.features.FeaturesDict({"tokens": tokens}),
            disable_shuffling=True,
        )

    def _shard_iterators_per_split(self, dl_manager):
        del dl_manager
        return {split: self._shards(stream) for split, stream in self._streams.items()}

    def _shards(self, stream: np.ndarray) -> list:
        T = self._sequence_length
        num_rows = (len(stream) - 1) // T
        step = max(1, SHARD_BYTES // ((T + 1) * stream.dtype.itemsize))
        return [
            functools.partial(self._rows, stream, first, min(first + step, num_rows))
            for first in range(0, num_rows, step)
        ]

    def _rows(self, stream: np.ndarray, first: int, last: int) -> Iterator[tuple[int, dict]]:
        T = self._sequence_length
        for i in range(first, last):
            yield i, {"tokens": np.asarray(stream[i * T : i * T + T + 1])}
            self._written += 1
            if self._written % _TOLD_ROWS == 0:
                self._wrote(self._written)
