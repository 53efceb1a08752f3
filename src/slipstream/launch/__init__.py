"""Starting ranks: local processes, torchrun, Slurm and several nodes, and how they meet."""
