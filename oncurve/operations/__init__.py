"""What commands do with recipes and finished runs: probe, compare, replay, verify, doctor."""
