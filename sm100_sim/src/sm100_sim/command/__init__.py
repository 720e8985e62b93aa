"""What the commands share: flags, what is printed, and the files they write."""
