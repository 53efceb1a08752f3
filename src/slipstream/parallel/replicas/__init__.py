"""Data parallelism: gradient reduction, sharded parameters and optimizer state, loss scaling."""
