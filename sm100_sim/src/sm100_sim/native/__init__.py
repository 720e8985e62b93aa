"""Machine operations in native code, and the run loop that calls them.

`translate.native_forms` says which instructions have a native routine and with which operands; a
routine does the whole operation, lets lanes sleep, or leaves everything as it was for the executor
in Python, which covers every form and raises every error.
"""
