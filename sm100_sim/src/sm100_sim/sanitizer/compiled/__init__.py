"""Rules of the sanitizer in native code: structures that Python shares, and their routines."""
