"""Commands that run configurations to answer: advise, atlas, check, explain, prove, tune and upgrade."""
