"""Host code of compiled functions, run on the CPU up to its launches."""
