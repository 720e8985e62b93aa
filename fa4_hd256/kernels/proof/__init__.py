"""Proofs that plans work: what each role does in a step, as data, and the run of all roles."""
