"""Two hundred requests for plans, drawn from a seed, and the plans that were given: a change that should change none
finds the same ones."""
