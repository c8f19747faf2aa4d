"""Data: prompts from files, public data sets and Python lists; preference pairs and reward-model data."""
