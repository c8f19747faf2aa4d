"""Tasks that generate their prompts: arithmetic, countdown, and multi-turn tasks with a calculator or a game."""
