"""What autograd saves of a forward: kept, recomputed or offloaded, and weight gradients that wait for W."""
