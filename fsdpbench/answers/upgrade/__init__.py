"""`fsdpbench upgrade`: run a script in two package environments and compare the results."""
