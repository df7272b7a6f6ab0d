"""Checks of what comes in, before any work starts. A leaf: imports nothing of ours but the error tree.

json_text.py   bytes -> JSON value, every hostile body an InvalidJson with its position
fields.py      declared fields -> checked values; an error names the path, what was found, what was expected, the fix
"""
