"""The KV cache: per layer, the arrays that the mechanism's `entry()` describes."""

from kvjax.cache.cache import Cache, abstract, allocate, append, check_capacity, empty, live_bytes
