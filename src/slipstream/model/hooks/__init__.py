"""What Slipstream registers with transformers, and what that code may ask about the current token slice."""
