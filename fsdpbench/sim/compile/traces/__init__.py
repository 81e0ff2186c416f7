"""What Dynamo made of a frame, kept on disk for later processes: its tracing is most of a warm compilation.

    a frame ─> key ─> entry on disk ─> its guards, built of the present values ─┬─ word by word the same: taken
                                                                                └─ else: traced, and kept

- `kept.py`: takes the place of Dynamo's tracing. `place.py`: under which key a trace lies.
- `guards.py`: the guards of a trace, and what they say. `meaning.py`: what an object's number in them means.
- `entry.py`: what is kept of a trace. `restored.py`: what the rest of Dynamo asks of a trace.

Nothing that is doubtful is kept: a guard of an unknown kind, a value that only its number tells apart, a break.
"""
