"""The native engine: it samples with the learner's own weights, on a CPU or through plain torch."""
