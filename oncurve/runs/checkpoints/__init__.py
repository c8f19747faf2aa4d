"""Checkpoints on disk: their files, the shards of several ranks, and the list of checkpoints."""
