"""Rewards: they score completions; a mix sums them, and the registry builds those that a recipe names."""
