"""The server of `fsdpbench mcp`: commands as tools of the Model Context Protocol, over standard input/output.

tools.py    a command's options as a JSON schema; a call's arguments as command-line words with checked paths
server.py   commands in their own processes, and the protocol: tools, and skills as prompts; `skills` and
            `schemas` are links into `docs`
"""
