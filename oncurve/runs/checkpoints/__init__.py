"""Checkpoints on disk: files, shards of several ranks, and the list of what there is."""
