"""Files that others may see, damage or write at the same time: read with limits, written whole, locked."""
