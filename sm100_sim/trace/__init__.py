"""What a launch did, in order."""
