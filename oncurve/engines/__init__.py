"""Engines sample completions; the native one decodes with the learner's own weights."""
