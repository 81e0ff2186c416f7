"""The model families, each with a file of modules and one for its workload."""
