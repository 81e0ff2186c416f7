"""Linear layers that multiply in 8 or 4 bits, forward and backward; weights keep their own dtype.

    fp8      one scale a tensor: e4m3, gradients of outputs in e5m2
    mxfp8    a power of two for 32 elements: e4m3
    nvfp4    a scale in e4m3 for 16 elements, and one a tensor: e2m1

The recipes are those of torchao 0.18's training layers, described in the files; only torch is imported.
"""
