"""The examples run, and say the same as the core."""
