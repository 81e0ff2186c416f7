"""Files of a simulated run: what holds simulated tensors goes into the run's folder, and is read there.

    torch.save(state, "best.pt")  ──>  runs/<name>/<config>/files/home/me/best.pt
    torch.load("best.pt")         ──>  the same file; /home/me/best.pt of a real training stays as it is

`layer.py` is the layer of files as it is looked at, `overlay.py` how it is changed (both past a script's
own view), `writing.py` decides what belongs there. `looking.py` and `operations.py` let
`os`, `shutil` and `open` go through it, `checkpoints.py` torch's and safetensors' own readers and writers;
`programs.py` refuses other programs that would go past it.

Text files, such as logs, and files without tensors stay where the script writes them.
"""

from __future__ import annotations

from fsdpbench.script.files.operations import ScriptFiles

__all__ = ["ScriptFiles"]
