"""lm-evaluation-harness asks a trained model: `adapter.Model` is one of its models."""
