"""The commands that answer questions with runs: advise, atlas, check, explain, prove, tune and upgrade."""
