"""`graph=step`: a whole training step as one CUDA graph. `watch.py` finds what no graph could hold,
`session.py` captures once steps repeat themselves, and replays: one launch for the whole step."""
