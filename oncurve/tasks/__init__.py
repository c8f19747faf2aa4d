"""Tasks: where prompts come from (puzzles, files, Python lists), and which of them a step uses."""
