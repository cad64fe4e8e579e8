"""Softmax attention over whole rows, for training: XLA, splash on TPUs, cuDNN on GPUs."""
