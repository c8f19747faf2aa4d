"""Runs, checkpoints, recipes and commands of version 1 keep working: this holds the current code to them."""
