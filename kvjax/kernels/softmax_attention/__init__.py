"""Softmax attention of whole rows, for training: XLA, splash on TPUs, cuDNN on GPUs."""
