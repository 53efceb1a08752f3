"""What layers, slices and messages cost: described hardware, counted operations, measured profiles."""
