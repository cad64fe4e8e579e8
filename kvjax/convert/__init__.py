"""Published models in, and smaller KV caches: what others have trained, as workdirs of kvjax."""
