"""A run on disk: its folder, database, checkpoints and feedback, and what its metrics mean."""
