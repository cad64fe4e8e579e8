"""Parameters, FLOPs, cache bytes and decoding time of a model, computed from its shapes."""
