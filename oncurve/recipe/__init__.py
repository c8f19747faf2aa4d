"""Recipes: what a run is to do, in TOML."""
