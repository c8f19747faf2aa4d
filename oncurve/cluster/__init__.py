"""A run on many machines: learners, samplers and reward workers as Ray actors. The trainer is the same as on one machine."""
