"""The stages of a recipe, one module each."""
