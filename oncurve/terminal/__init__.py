"""What a run looks like in a terminal: the live display, summaries, tables, errors."""
