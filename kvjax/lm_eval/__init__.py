"""Runs tasks of lm-evaluation-harness on a trained model, by the adapter `adapter.KvjaxLM`."""
