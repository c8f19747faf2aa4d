"""The live display of a run."""
