"""GRPO, graded on the curve of its own group."""
