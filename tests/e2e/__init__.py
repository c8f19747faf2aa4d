"""Complete runs: killed, resumed, repeated, and learning."""
