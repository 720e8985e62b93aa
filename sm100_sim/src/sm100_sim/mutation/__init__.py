"""Synchronisation left out of kernels: would the sanitizer notice?"""
