"""Golden cases of the rules of the machine, kept and broken, and how each kernel ends."""
