"""The papers' measured tables, and what Slipstream's costs predict for them."""
