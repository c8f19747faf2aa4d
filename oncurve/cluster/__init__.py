"""A run on many machines: learner, samplers and reward workers as Ray actors. `train.run` is the same as on one machine."""
