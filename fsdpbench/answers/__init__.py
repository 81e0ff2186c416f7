"""The commands that answer a question by running configurations: advise, atlas, check, explain, tune."""

from fsdpbench.base.files.documents import texts_beside

error_text = texts_beside(__file__, "errors.toml")
