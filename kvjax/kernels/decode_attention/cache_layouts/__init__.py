"""Cache layouts, one file each: inputs of decode attention, definition, tiles in plain JAX, FLOPs.

A new layout is a new file with the interface of `layout.py`. Plain JAX supports all layouts, the
TPU and GPU kernels some.
"""

from kvjax.kernels.decode_attention.cache_layouts.factored import FactoredInputs
from kvjax.kernels.decode_attention.cache_layouts.grouped import GroupedInputs
from kvjax.kernels.decode_attention.cache_layouts.latent import LatentInputs
from kvjax.kernels.decode_attention.cache_layouts.latent_residual import LatentResidualInputs
from kvjax.kernels.decode_attention.cache_layouts.layout import (
    DecodeFlops,
    DecodeInputs,
    PositionBias,
    SlopeBias,
)
from kvjax.kernels.decode_attention.cache_layouts.rebuilt import RebuiltInputs
from kvjax.kernels.decode_attention.cache_layouts.residual import ResidualInputs
from kvjax.kernels.decode_attention.cache_layouts.tensor_product import TensorProductInputs
from kvjax.kernels.decode_attention.cache_layouts.tied import TiedInputs

__all__ = [
    "DecodeFlops",
    "DecodeInputs",
    "FactoredInputs",
    "GroupedInputs",
    "LatentInputs",
    "LatentResidualInputs",
    "PositionBias",
    "RebuiltInputs",
    "ResidualInputs",
    "SlopeBias",
    "TensorProductInputs",
    "TiedInputs",
]
