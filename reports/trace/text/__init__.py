"""The text of a trace file: blocks of bytes, cut between events, repaired where it is not valid JSON."""
