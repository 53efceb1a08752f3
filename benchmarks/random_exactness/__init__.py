"""Random combinations of all that a Pipeline takes, each compared with the unsplit model in one process in float64."""
