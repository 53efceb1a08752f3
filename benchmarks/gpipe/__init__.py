"""GPipe's tables, measured and simulated here: balance, throughput, memory, a step's breakdown, and peers."""
