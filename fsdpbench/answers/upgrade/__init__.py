"""`fsdpbench upgrade`: one script in two environments of packages, and what differs, by cause.

environments.py ─> runs.py ─> differences.py ─> report.py
      └──────── bisection.py ───────┘
"""
