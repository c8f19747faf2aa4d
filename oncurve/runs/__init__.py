"""A run on disk: its folder, its database, its checkpoints, and what its metrics mean."""
