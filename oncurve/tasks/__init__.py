"""What is asked: the built-in puzzles, files of prompts, prompts from memory, and the order in which steps ask them."""
