"""Recipes: TOML files that describe a run."""
