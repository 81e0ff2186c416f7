"""From options to a checked request."""
