"""Messages between ranks: their format, their transport, and skip connections."""
