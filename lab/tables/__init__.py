"""The files of docs/tables: which command prints each, and how old it is."""
