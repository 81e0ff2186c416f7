"""Linear layers that multiply in 8 or 4 bits, forward and backward; weights keep their dtype.

    fp8      one scale per tensor: e4m3, output gradients in e5m2
    mxfp8    a power of two per 32 elements: e4m3
    nvfp4    a scale in e4m3 per 16 elements, and one per tensor: e2m1

The recipes are those of torchao 0.18's training layers, as described in the files; only torch is imported.
"""
