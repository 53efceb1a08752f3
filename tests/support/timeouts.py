"""How long a test waits for other processes, in seconds."""

LIMIT = 800  # before it says that they hang: less than pytest itself, and several times what the slowest test takes
SOON = 200  # for what takes a few on a quiet machine: less than what gloo and stores wait by themselves, 300 and more
