"""Printed output of commands: tables, progress, notes."""
