"""`fsdpbench upgrade`: one script in two environments of packages, and what differs."""
