"""The first hour on a GPU: `python -m bench bringup` (docs/bringup.md).

| module | what |
|---|---|
| stages | the table of stages, in order; a module for each: `items`, `missing`, `run` |
| outcome | what a step ended in, and what it runs on |
| runner, child | processes, limits, restart; the process of one or more steps |
| report | the report as text and JSON; its figures as a machine of the timing model |

A stage's module is imported in its child process only; the runner needs the standard library.
"""
