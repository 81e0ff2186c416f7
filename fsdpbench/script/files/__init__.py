"""Files of a simulated run: those with simulated tensors go into the run's folder, and are read there.

    torch.save(state, "best.pt")  ──>  runs/<name>/<config>/files/home/me/best.pt
    torch.load("best.pt")         ──>  the same file; /home/me/best.pt of a real training stays as it is

`overlay.py` is the layer of files, past a script's own view; `operations.py` lets `os`, `shutil` and `open`
go through it, and refuses other programs that would go past it; `writing.py` decides which files belong
there, and lets the readers and writers of torch and safetensors go through it.

Text files, such as logs, and files without tensors stay where the script writes them.
"""

from __future__ import annotations

from fsdpbench.script.files.operations import ScriptFiles

__all__ = ["ScriptFiles"]
