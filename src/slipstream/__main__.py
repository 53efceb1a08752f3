"""Runs the `slipstream` command as `python -m slipstream`."""

from slipstream.cli import main

if __name__ == "__main__":
    main()
