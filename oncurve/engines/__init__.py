"""Engines sample completions: the native one with the learner's own weights, vLLM in its own process."""
