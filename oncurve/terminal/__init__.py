"""Terminal output: the live display, summaries, tables and errors."""
