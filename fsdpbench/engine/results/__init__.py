"""Rank records, the result built from them, and the folder that stores results.

    records.py (a rank) ─> result.py (a configuration) ─> store.py (a sweep's folder, its index)

The folders of configurations hold all data; everything else can be rebuilt from them.
"""
