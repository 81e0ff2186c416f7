"""`fsdpbench reproduce`: the figures of a publication, published and simulated in one chart."""
