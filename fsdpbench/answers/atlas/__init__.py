"""`fsdpbench atlas`: simulate the best FSDP settings for known models and chips once, and look them up."""
