"""The display while a run trains, and the summary at its end."""
