"""Training: the loop, the learner, and one file per stage."""
