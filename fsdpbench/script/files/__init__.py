"""Files of a simulated run: what holds simulated tensors goes into the run's folder, and is read there.

    torch.save(state, "best.pt")  ──>  runs/<name>/<config>/files/home/me/best.pt
    torch.load("best.pt")         ──>  the same file; /home/me/best.pt of a real training stays as it is

`overlay.py` is the layer of files, `writing.py` decides what belongs there, `operations.py` lets `os`,
`shutil` and `open` look through it, `checkpoints.py` does so for torch's and safetensors' own readers and
writers. Text files, such as logs, and files without tensors stay where the script writes them.
"""

from __future__ import annotations

from fsdpbench.script.files.operations import ScriptFiles

__all__ = ["ScriptFiles"]
