"""The header of a GGUF file: metadata by key, and tensors that are not read yet."""

from etils import epath
import gguf
import numpy as np

from kvjax.foundation.errors import UserError, first_line

# Limit on values in a header; a vocabulary of 256K tokens with its merges has 2M.
_MOST_VALUES = 1 << 22


class _Reader(gguf.GGUFReader):
    """The library's reader, with limits on the file's counts, which the library does not check."""

    _values = 0

    def _get(self, offset, dtype, count=1, override_order=None):
        self._values += 1
        if self._values > _MOST_VALUES:
            raise ValueError(f"its header has more than {_MOST_VALUES:,} values")
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"it has {len(self.data):,} bytes of {end:,}")
        return super()._get(offset, dtype, count, override_order)


def read(path: epath.Path) -> tuple[dict, list[gguf.ReaderTensor]]:
    """Returns the metadata by key, and the tensors, which are memory-mapped.

    Raises:
      UserError: the file is no GGUF file, is damaged, has another machine's byte order, is one of
        several parts, or holds an adapter.
    """
    try:
        reader = _Reader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # damaged files raise many types
        raise UserError(
            f"{path} is not a GGUF file, or is damaged ({first_line(error)}): download it again"
        ) from error
    if reader.byte_order != "I":
        raise UserError(
            f"{path} has another machine's byte order: convert the model again on this machine"
        )
    if fields.get("split.count", 1) not in (0, 1):
        raise UserError(
            f"{path}: split.count = {fields['split.count']}: merge the parts first "
            "(llama-gguf-split --merge)"
        )
    if fields.get("general.type") == "adapter":
        raise UserError(
            f"{path} is an adapter (LoRA), not a model: merge it into its model first "
            "(llama-export-lora)"
        )
    return fields, reader.tensors
