"""What ran when, measured or simulated: spans, idle intervals with their causes, pictures and traces."""
