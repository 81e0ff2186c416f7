"""The server of `fsdpbench mcp`: commands as tools of the Model Context Protocol, over the standard streams.

tools.py    a command's options as a JSON schema; a call's arguments as its words, all paths inside
child.py    the command in a process of its own: its progress, its end
server.py   the protocol: tools, and skills as prompts; `skills` and `schemas` are links into `docs`
"""
