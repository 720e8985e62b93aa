"""Parts of the commands: flags, what is printed, and the files they write."""
