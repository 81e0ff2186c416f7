"""Hardware profiles and what follows from them: sections, files, the network."""
