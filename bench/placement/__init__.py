"""Placement policies on a recorded trace, in virtual time: the project's own code against readings of its peers' rules."""
