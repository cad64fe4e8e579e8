"""The KV cache: for each layer, the arrays that the mechanism's `entry()` describes."""

from kvjax.cache.cache import Cache
from kvjax.cache.cache import abstract
from kvjax.cache.cache import allocate
from kvjax.cache.cache import append
from kvjax.cache.cache import check_capacity
from kvjax.cache.cache import empty
from kvjax.cache.cache import live_bytes

__all__ = ["Cache", "abstract", "allocate", "append", "check_capacity", "empty", "live_bytes"]
