"""Files of a simulated run: files with simulated tensors end in the run's folder, all others where the script
writes them.

    torch.save(state, "new.pt")    ──>  new.pt; at the script's end runs/<name>/<config>/files/home/me/new.pt
    torch.save(state, "best.pt")   ──>  runs/<name>/<config>/files/home/me/best.pt, if a real best.pt exists
    torch.load("best.pt")          ──>  the same file
"""

from fsdpbench.script.files.operations import ScriptFiles

__all__ = ["ScriptFiles"]
