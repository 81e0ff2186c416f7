"""Sweeps: available choices, what this machine can run, plans, and resumable runs of many configurations."""
