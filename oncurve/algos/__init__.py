"""The formulas of RL: pure torch functions over records, each with its equation, its source and the choices it leaves open."""
