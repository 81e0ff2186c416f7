"""Conversion of command-line options to a checked request."""
