"""lm-evaluation-harness asks a trained model: `adapter.KvjaxLM` is one of its models."""
