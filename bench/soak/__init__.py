"""A gateway that runs for days, in minutes."""
