"""Published models and data sets: names on a hub, folders, config.json, headers of GGUF files."""
