"""Shows runs as one HTML file that needs no network: curves, the last step's timeline, and events."""

from slipstream.extras.run_page.write_page import write_run_page
