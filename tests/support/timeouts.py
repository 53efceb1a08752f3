"""How long a test waits for other processes before it says that they hang."""

LIMIT = 800  # seconds: less than pytest's own limit, and several times what the slowest test takes on a slow machine
