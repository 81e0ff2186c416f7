"""`fsdpbench atlas`: the best FSDP settings for known models on known chips, simulated once and looked up."""
