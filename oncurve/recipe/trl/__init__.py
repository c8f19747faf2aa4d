"""Translation of TRL configurations into recipes."""
