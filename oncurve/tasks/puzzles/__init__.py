"""Tasks that generate their own prompts: arithmetic, countdown, and games with several turns."""
