"""The commands that answer a question by running configurations: advise, atlas, check, explain, tune."""
