"""Routers side by side in front of the same simulated engines, with the same traffic: `python -m bench.peers --help`."""
