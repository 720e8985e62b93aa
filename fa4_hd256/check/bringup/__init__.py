"""The first hour on a GPU: `python -m fa4_hd256 bringup` (docs/bringup.md).

| module | what |
|---|---|
| rungs | the table of rungs, in order: name, module, limits, what each settles |
| outcome | what a step ended in, and what it runs on |
| runner | processes, limits, restart; `child` is the process of one or more steps |
| command | the options of the command |
| machine, golden, kernels, ... | the steps of one rung: `items`, `missing`, `run` |
| report, page | text and JSON; the HTML page |

A rung's module is imported in its child process only; the runner itself needs the standard library.
"""
